"""autopar: a declarative auto-parallel compiler for PyTorch Transformers."""

__version__ = "0.1.0"
