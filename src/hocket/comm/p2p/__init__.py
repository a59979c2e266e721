"""Point-to-point inside a host: streams of bytes in shared memory, and messages with tags."""

from ._shm_streams import ShmStreams as ShmStreams
from ._shm_streams import open_streams as open_streams
from ._shm_streams import publish_streams as publish_streams
from ._tag_matcher import TagMatcher as TagMatcher

__all__ = ["ShmStreams", "TagMatcher", "open_streams", "publish_streams"]
