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

        class _ArrayOnly:
            """`Float[Tensor, "token width"]` is a Tensor."""

            def __class_getitem__(cls, array_and_shape: tuple[Any, str]) -> Any:
                return array_and_shape[0]

        Bool = Complex = Float = Int = Shaped = _ArrayOnly

__all__ = ["Bool", "Complex", "Float", "Int", "Shaped"]
