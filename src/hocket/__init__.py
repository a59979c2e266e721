"""Hocket trains on many devices the model that you have written for one."""

__version__ = "0.1.0.dev0"
