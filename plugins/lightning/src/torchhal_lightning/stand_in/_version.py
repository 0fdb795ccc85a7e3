"""The version of Lightning whose names the stand-in has."""

__version__ = "2.6.6"
