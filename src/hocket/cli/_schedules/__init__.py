"""What the verbs `schedule` and `tune` share."""

from typing import Final

ENGINE: Final = "engine"
"""How the engine's own collective is called among measured algorithms."""
