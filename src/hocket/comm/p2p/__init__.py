"""Point-to-point: streams of bytes in shared memory, messages with tags over them, and messages between hosts."""

from ._host_messages import HostMessages
from ._shm_streams import ShmStreams, open_streams, publish_streams
from ._tag_matcher import TagMatcher

__all__ = ["HostMessages", "ShmStreams", "TagMatcher", "open_streams", "publish_streams"]
