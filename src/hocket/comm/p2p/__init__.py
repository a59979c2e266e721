"""Point-to-point inside a host: streams of bytes in shared memory, and messages with tags."""

from ._shm_streams import ShmStreams, open_streams, publish_streams
from ._tag_matcher import TagMatcher

__all__ = ["ShmStreams", "TagMatcher", "open_streams", "publish_streams"]
