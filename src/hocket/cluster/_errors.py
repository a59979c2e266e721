"""What is said when a description of a cluster is wrong."""


class ClusterError(ValueError):
    """A cluster's description is wrong, or asks for what the cluster has not.

    Attributes:
        path: Where in the document, as in `links[3].bandwidth`; empty where there is no document.
    """

    def __init__(self, message: str, *, path: str = "") -> None:
        super().__init__(f"{path}: {message}" if path else message)
        self.path = path


class NoSuchNodeError(ClusterError, KeyError):
    """A cluster has no node of that name; a KeyError too, as of any table that is asked for what it has not."""

    __str__ = Exception.__str__  # KeyError would show its message in quotes
