"""Measurements of a whole cluster on this machine: `make bench`. Not part of the package."""
