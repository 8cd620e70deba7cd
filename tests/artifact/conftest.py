"""A model in pieces, its description and an empty store, for all tests of this room."""

from tests.support.layered import artifact, bundle, model

__all__ = ["artifact", "bundle", "model"]
