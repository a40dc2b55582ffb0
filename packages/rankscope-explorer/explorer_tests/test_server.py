"""A connection over which no request arrives does not keep others out."""

import socket

import pytest

from explorer_tests.serving import QUICK, raw, serving, small_networks


@pytest.mark.slow
def test_a_connection_without_a_request_is_closed() -> None:
    with serving(small_networks(), patience=0.2) as slow:
        own = f"Host: 127.0.0.1:{slow.port}\r\n".encode()
        for begun in (b"", b"GET / HT", b"GET / HTTP/1.1\r\n" + own):
            assert raw(slow, begun) == b""
        with socket.create_connection(("127.0.0.1", slow.port), timeout=30) as line:
            line.sendall(b"POST / HTTP/1.1\r\n" + own + b"Content-Length: 99999999\r\n\r\nand no more")
            assert b"405" in b"".join(iter(lambda: line.recv(4096), b""))
        assert slow.ask(QUICK).status_code == 200
