"""Whether the hub of models answers at all.

Its client tries a silent network for a minute and more. One connection of a few seconds tells as much, and
changes no setting of the client's.
"""

import socket
from threading import Thread
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from rankscope.naming import hub_address

PORTS = {"http": 80, "https": 443, "socks5": 1080, "socks5h": 1080}


def answers(seconds: float = 3.0) -> bool:
    """True if the hub, or the proxy on the way to it, takes a connection within `seconds`; False too if the
    hub's client was told to stay offline."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return False
    parts = urlsplit(hub_address())
    proxies = {} if proxy_bypass(parts.hostname or "") else getproxies()
    proxy = proxies.get(parts.scheme) or proxies.get("all")
    if proxy:
        parts = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
    return _connects(parts.hostname or "", parts.port or PORTS.get(parts.scheme, 443), seconds)


def _connects(host: str, port: int, seconds: float) -> bool:
    """Connect in a thread: looking up a host name has no time limit of its own."""
    connected: list[bool] = []

    def connect() -> None:
        try:
            socket.create_connection((host, port), timeout=seconds).close()
        except OSError:
            return
        connected.append(True)

    thread = Thread(target=connect, daemon=True)
    thread.start()
    thread.join(seconds)
    return bool(connected)
