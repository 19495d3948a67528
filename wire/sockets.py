"""What both ends must agree on about socket files.

The daemon refuses a path that it could not bind, the engine one that it could not connect to: the limit is the
kernel's, and the engine's mount path counts as well.
"""

from __future__ import annotations

__all__ = ["DAEMON_SOCKET", "PATH_LIMIT_BYTES"]

#: The socket of the whole daemon, beside those of its ranks.
DAEMON_SOCKET = "daemon.sock"
#: sockaddr_un.sun_path holds 108 bytes with the terminating zero (unix(7)).
PATH_LIMIT_BYTES = 107
