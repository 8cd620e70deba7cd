"""Sharing blocks between files, where the file system can (btrfs, XFS, ZFS): a copy that copies nothing.

Owns the system call of Linux. Whoever calls decides what a refusal means. Shown by tests/artifact/test_blocks.py.
"""

from __future__ import annotations

import fcntl
import struct

_FICLONERANGE = 0x4020940D
_RANGE = struct.Struct("=qQQQ")


def share(source: int, target: int, *, size: int = 0, offset: int = 0, position: int = 0) -> None:
    """Let `size` bytes from `position` of `target` on be those from `offset` of `source` on: both open files, all three
    multiples of a block, `size` 0 for all up to the end. OSError where it cannot be: mostly EOPNOTSUPP, EXDEV, EINVAL,
    and ENOTTY on other systems. Format: struct file_clone_range of linux/fs.h."""
    fcntl.ioctl(target, _FICLONERANGE, _RANGE.pack(source, offset, size, position))
