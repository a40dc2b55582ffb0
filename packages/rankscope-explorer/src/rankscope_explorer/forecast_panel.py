"""The panel of forecasts: what is to be expected of the network that the page shows, were it trained.

`api.py` computes it as a job of its own, after the measurement and in another thread: a forecast takes seconds, and
changes that would mend the network minutes. Where it would take long, the panel says so, and waits to be asked. Text
and tokens of the page make no difference to a forecast, which is of a task of the lab.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from rankscope.errors import LateError, RankscopeError
from rankscope.forecasts import PARTS, Design, Forecast, Mend, chance_words, forecast, place_of_100
from rankscope.nets import Architecture
from rankscope_explorer.answers import network_with, page_sentence
from rankscope_explorer.controls import Controls, ForecastRequest, in_page_words
from rankscope_explorer.jobs import InterruptMode, JobCancelled
from rankscope_explorer.network_cache import NetworkCache, weights_drawn

FORECAST_SECONDS = 600.0  # that a forecast with its mends may take
UNASKED, LARGEST, MENDED = 20.0, 120.0, 40.0  # of `size`: forecast at once; at all; with mends
MOST_KEPT, MOST_MENDS = 64, 8  # forecasts that are kept, in words and numbers; mends that are shown
TRAINED = "These weights were trained, and a forecast is of networks that were not: choose a random network for one."


class ForecastPanel:
    """Answers the requests of panels, and keeps the latest results, without their networks."""

    def __init__(self, networks: NetworkCache) -> None:
        self.networks = networks
        self._kept: OrderedDict[tuple[str, Controls], dict[str, Any]] = OrderedDict()
        self._last: tuple[Controls, Forecast] | None = None  # so that mends need no second forecast

    def parts(self, request: ForecastRequest, check: Callable[[], None]) -> Iterator[dict[str, Any]]:
        """Yield the forecast and, if they are asked for, mends as they are found; `check` is called on the way and may
        raise."""
        controls = request.setting.model_copy(update={"text": "", "tokens": Controls().tokens})
        bare = self.networks.bare(controls)
        if not weights_drawn(bare):
            yield {"part": "forecast", "why": TRAINED}
            return
        base = self.networks.network(controls)
        net = network_with(base, controls)
        if (why := too_large(net.arch, request.large)) is not None:
            yield {"part": "forecast", **why}
            return
        # Weights of mends are drawn as those of the network were.
        init = "bert" if base.origin is None else str(base.origin.described().get("init", "bert"))

        def forecast_now() -> Forecast:
            if self._last is None or self._last[0] != controls:
                self._last = controls, forecast(net, design=Design(init=init))
            return self._last[1]

        answer, mended = self._kept.get(("forecast", controls)), self._kept.get(("mends", controls))
        if answer is None:
            with self._computing(check):
                answer = self._keep("forecast", controls, _answer(forecast_now, controls, bare.arch.layers))
        yield {"part": "forecast", **answer}
        if request.mends and answer.get("mends"):
            if mended is None:
                yield from self._mends(forecast_now, controls, check)
            else:
                yield {"part": "mends", **mended}

    @contextmanager
    def _computing(self, check: Callable[[], None]) -> Iterator[None]:
        """Inside, no network is loaded, and `check` is called at every torch operation. A forecast leaves out what is
        refused with an error, so what ends the computation goes through it as no `Exception`."""

        def watched() -> None:
            try:
                check()
            except LateError as error:
                raise _OutOfTime(error) from error
            if self.networks.load_waits.is_set():
                raise JobCancelled  # the page asks again

        with self.networks.forecasting:
            try:
                with InterruptMode(watched):
                    yield
            except _OutOfTime as late:
                raise late.error from None

    def _mends(
        self, forecast_now: Callable[[], Forecast], controls: Controls, check: Callable[[], None]
    ) -> Iterator[dict[str, Any]]:
        """Yield the best changes after each kind of change that was tried; all of them are kept at the end."""
        mends: list[Mend] = []
        answer: dict[str, Any] = {}
        for done, part in enumerate(PARTS, 1):
            with self._computing(check):
                current = forecast_now()
                if done > 1:  # weights drawn anew, nothing else changed, were tried with the first kind
                    current = replace(current, plan=replace(current.design, net=None))
                mends += current.mends((part,), most=MOST_MENDS)
            mends.sort(key=lambda mend: (-round(mend.forecast.probability, 2), mend.forecast.place))
            rows = [
                {"change": mend.change, "probability": mend.forecast.probability,
                 "guess": bool(mend.forecast.doubts), "place": place_of_100(mend.forecast.place)}
                for mend in mends[:MOST_MENDS]
            ]  # fmt: skip
            answer = {"mends": rows, "done": done, "total": len(PARTS)}
            if done < len(PARTS):
                yield {"part": "mends", **answer}
        yield {"part": "mends", **self._keep("mends", controls, answer)}

    def _keep(self, kind: str, controls: Controls, answer: dict[str, Any]) -> dict[str, Any]:
        self._kept[kind, controls] = answer
        while len(self._kept) > MOST_KEPT:
            self._kept.popitem(last=False)
        return answer


class _OutOfTime(BaseException):
    """Carries the error of a computation that takes too long past whatever catches errors on the way."""

    def __init__(self, error: LateError) -> None:
        super().__init__()
        self.error = error


def _answer(forecast_now: Callable[[], Forecast], controls: Controls, base_depth: int) -> dict[str, Any]:
    """The numbers and sentences of a forecast, or a sentence that says why there is none; the network has `base_depth`
    layers of its own."""
    try:
        result = forecast_now()
    except RankscopeError as error:
        return {"why": page_sentence(error)}
    sentences = [in_page_words(sentence) for sentence in result.verdict]
    if controls.layers is not None and controls.layers > base_depth:
        sentences.append(f"Layers after the first {base_depth} repeat those, with the same weights.")
    return {
        "probability": result.probability, "chance": chance_words(result.probability, bool(result.doubts)),
        "place": place_of_100(result.place), "spread": round(100 * result.prediction.place_spread),
        "sentences": sentences, "mends": size(result.design.arch) <= MENDED,
    }  # fmt: skip


def size(arch: Architecture) -> float:
    """How long the forecast of a network takes, in what a layer of little width takes: about a second on one core.

    >>> size(Architecture(layers=6, width=128, heads=4))
    9.0
    """
    return arch.layers * (1 + arch.width**2 / 2**15)


def too_large(arch: Architecture, asked: bool) -> dict[str, Any] | None:
    """Why a network is not forecast, and whether it would be if it were asked for; None if it is forecast."""
    many, work = f"{arch.layers} layers of width {arch.width}", size(arch)
    if work > LARGEST:
        return {"why": f"A forecast of {many} takes too long for a page: rankscope forecast does it.", "ask": False}
    if work > UNASKED and not asked:
        return {"why": f"A forecast of {many} takes half a minute or more, so it is made on demand.", "ask": True}
    return None
