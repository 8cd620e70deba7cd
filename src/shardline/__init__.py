"""Shardline: one open model served over several machines."""

__version__ = "0.1.0"
