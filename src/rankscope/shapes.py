"""The shapes that signatures say, as `Float[Tensor, "*batch token width"]`.

They are jaxtyping's, which holds the tests to them; where it is not installed they are words for the reader.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxtyping import Bool, Complex, Float, Int, Shaped
else:
    try:
        from jaxtyping import Bool, Complex, Float, Int, Shaped
    except ImportError:

        class _Said:
            """`Float[Tensor, "token width"]` is a Tensor."""

            def __class_getitem__(cls, said: tuple[Any, str]) -> Any:
                return said[0]

        Bool = Complex = Float = Int = Shaped = _Said

__all__ = ["Bool", "Complex", "Float", "Int", "Shaped"]
