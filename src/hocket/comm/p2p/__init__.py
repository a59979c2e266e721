"""Point-to-point inside a host: streams of bytes in shared memory, and messages with tags."""

from ._mailbox import Mailbox as Mailbox
from ._mailbox import open_mailbox as open_mailbox
from ._mailbox import publish_mailbox as publish_mailbox
from ._postbox import Postbox as Postbox

__all__ = ["Mailbox", "Postbox", "open_mailbox", "publish_mailbox"]
