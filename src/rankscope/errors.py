"""The errors of rankscope: a class for each kind of mistake, all of them `RankscopeError`.

The command line prints an error as one sentence and exits with 2. Each message says what was expected, what was
given, and what to do about it; `subject` names the argument, field or file. Two are warnings: with `TrainingWarning` a
monitor says what goes wrong in a training run, and `PluginWarning` names a plugin that is left out.
"""

from collections.abc import Collection, Iterable
from difflib import get_close_matches


class RankscopeError(Exception):
    """Base of every error that rankscope raises on purpose.

    Args:
        message: One sentence for people: what was expected, what was given, what to do.
        subject: What the error is about, for programs: the name of the argument, field, file or part that was
            wrong (`"heads"`, `"attention_mask"`). Empty where the class alone says it.

    >>> error = RankscopeError("heads must divide width; got 3 heads and width 64", subject="heads")
    >>> str(error), error.subject
    ('heads must divide width; got 3 heads and width 64', 'heads')
    """

    def __init__(self, message: str = "", *, subject: str = "") -> None:
        super().__init__(message)
        self.subject = subject


class ArchitectureError(RankscopeError, ValueError):
    """A network that cannot be described so."""


class MaskError(RankscopeError, ValueError):
    """A mask that is not a graph on the tokens."""


class WeightsError(RankscopeError, ValueError):
    """Tensors that do not fit their architecture."""


class TokensError(RankscopeError, ValueError):
    """Tokens or padding of the wrong shape, dtype or content."""


class MetricError(RankscopeError, ValueError):
    """A metric that does not exist or does not apply."""


class TooLargeError(RankscopeError, MemoryError):
    """What needs more memory than there is."""


class WatchError(RankscopeError, RuntimeError):
    """A live model that cannot be watched so."""


class MonitorError(WatchError):
    """A training run that cannot be monitored so."""


class TrainingWarning(UserWarning):
    """Something goes wrong in a training run that is monitored."""


class PluginError(RankscopeError, ValueError):
    """What an installed package declares for rankscope, and cannot be used."""


class PluginWarning(UserWarning):
    """A plugin is left out: what is wrong with it, and what to do."""


class FileError(RankscopeError, OSError):
    """A file that is missing, damaged or of another kind."""


class SourceError(RankscopeError, ValueError):
    """A model that cannot be loaded, or is not what its family says."""


class ParityError(SourceError):
    """The canonical network does not compute what the original does."""


class MissingExtraError(SourceError, ImportError):
    """An optional package that is not installed; the message has the line that installs it."""


class PathError(RankscopeError, ValueError):
    """A path, length or head that the network does not have."""


class TheoremError(RankscopeError, ValueError):
    """A theorem that there is not, or a question that theory cannot be asked."""


class StudyError(RankscopeError, ValueError):
    """A paper or figure that there is no study of, or a study that cannot be run so."""


class FigureError(RankscopeError, ValueError):
    """Axes that a figure cannot be drawn into."""


class LabError(RankscopeError, ValueError):
    """A task that there is not, or networks that cannot be trained so."""


class SweepError(RankscopeError, ValueError):
    """A sweep's specification, or where it is to run, does not hold together."""


class ExplorerError(RankscopeError):
    """A request that the explorer does not answer."""


class SettingError(ExplorerError, ValueError):
    """A setting of the explorer that is out of range, or no setting at all."""


class BusyError(ExplorerError, RuntimeError):
    """More requests than the explorer lets wait."""


class LateError(ExplorerError, TimeoutError):
    """An answer of the explorer that takes longer than it may."""


class ClosureError(RankscopeError, ArithmeticError):
    """Parts that do not add up to the whole."""


class ConvergenceError(RankscopeError, ArithmeticError):
    """A numerical search that did not reach its tolerance."""


def one_of(what: str, got: object, known: Iterable[str], close: float = 0.6) -> str:
    """The sentence for a name outside a fixed set, before all of them the nearest that is at least as `close`.

    >>> one_of("norm", "leyer", ["layer", "rms"])
    "got 'leyer', did you mean 'layer'? norm must be one of layer, rms"
    >>> one_of("norm", "batch", ["layer", "rms"])
    "norm must be one of layer, rms; got 'batch'"
    """
    names = list(known)
    near = get_close_matches(str(got), names, n=1, cutoff=close)
    expected = f"{what} must be one of {', '.join(names)}"
    return f"got {got!r}, did you mean {near[0]!r}? {expected}" if near else f"{expected}; got {got!r}"


def require(condition: object, sentence: str, error: type[RankscopeError], subject: str = "") -> None:
    """An error that says one sentence, where a condition does not hold.

    What the type checker must know afterwards (`is None`, `isinstance`), and a sentence that costs time or can only
    be said once the condition failed, stay an `if` with a `raise`: the sentence is put together either way.

    Args:
        condition: What must be true.
        sentence: What was expected, what was given, what to do.
        error: The class of the error.
        subject: The name of the argument, field, file or part that is wrong.

    >>> require(0 >= 1, "batch must be at least 1 sample; got 0", TokensError, "batch")
    Traceback (most recent call last):
    rankscope.errors.TokensError: batch must be at least 1 sample; got 0
    """
    if not condition:
        raise error(sentence, subject=subject)


def require_one_of(
    what: str, got: object, known: Collection[object], error: type[RankscopeError], subject: str = ""
) -> None:
    """An error that lists the known names, where `got` is none of them; its subject is `what` unless said.

    >>> require_one_of("norm", "batch", ["layer", "rms"], ArchitectureError)
    Traceback (most recent call last):
    rankscope.errors.ArchitectureError: norm must be one of layer, rms; got 'batch'
    """
    if got not in tuple(known):
        raise error(one_of(what, got, map(str, known)), subject=subject or what)
