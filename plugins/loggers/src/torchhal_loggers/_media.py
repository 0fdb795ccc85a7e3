"""Convert images and figures to PNG."""

from __future__ import annotations

import io
from typing import Any

from torchhal.trainer.loggers import as_pixels


def image_png(image: Any) -> bytes:
    """Return an image as PNG.

    Args:
        image: as :func:`torchhal.trainer.loggers.as_pixels` takes it.

    Raises:
        TypeError, ValueError: it is no image.
    """
    from PIL import Image

    content = io.BytesIO()
    Image.fromarray(as_pixels(image)).save(content, format="PNG")
    return content.getvalue()


def figure_png(figure: Any) -> bytes:
    """Return a figure of matplotlib as PNG, and leave it open.

    Raises:
        TypeError: it is something else.
    """
    if not hasattr(figure, "savefig"):
        raise TypeError(f"a figure must be a matplotlib.figure.Figure (got {type(figure).__name__})")
    content = io.BytesIO()
    figure.savefig(content, format="png")
    return content.getvalue()
