"""Loaded before all else of the tests, `conftest` too."""

import sys

# What pytest rewrites, tests and hypothesis, is kept also where PYTHONDONTWRITEBYTECODE is set (as in many images):
# else each process of each run compiles it anew.
sys.dont_write_bytecode = False
