"""Convert the images that a user logs to arrays of pixels."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch


def as_pixels(image: Any) -> np.ndarray[Any, Any]:
    """Return an image as an array of ``uint8``, of shape (height, width) or (height, width, 3 or 4).

    Args:
        image: a tensor or an array of shape (channels, height, width) or (height, width), of ``uint8`` or of floats
            between 0 and 1 (what lies outside is cut off, and NaN is 0), with 1, 3 or 4 channels; or an image of PIL.

    Raises:
        TypeError: it is something else.
        ValueError: it has another shape or dtype.

    .. versionadded:: 0.2
    """
    if hasattr(image, "convert") and hasattr(image, "getbands"):  # of PIL
        return np.asarray(image if image.mode in {"L", "RGB", "RGBA"} else image.convert("RGB"), dtype=np.uint8)
    if isinstance(image, torch.Tensor):
        image = image.detach().cpu()
        image = (image.float() if image.is_floating_point() else image).numpy()
    if not isinstance(image, np.ndarray):
        raise TypeError(f"an image must be a tensor, an array or an image of PIL (got {type(image).__name__})")
    if image.ndim == 3 and image.shape[0] == 1:
        image = image[0]
    if not (image.ndim == 2 or (image.ndim == 3 and image.shape[0] in {3, 4})):
        raise ValueError(
            f"an image must have the shape (1, 3 or 4 channels, height, width) or (height, width) (got {image.shape})"
        )
    if image.dtype == np.bool_:
        image = image.astype(np.float32)
    if np.issubdtype(image.dtype, np.floating):
        image = (np.nan_to_num(image).clip(0, 1) * 255).round().astype(np.uint8)
    if image.dtype != np.uint8:
        raise ValueError(f"an image must be of uint8, or of floats between 0 and 1 (got {image.dtype})")
    pixels: np.ndarray[Any, Any] = image if image.ndim == 2 else image.transpose(1, 2, 0)
    return pixels
