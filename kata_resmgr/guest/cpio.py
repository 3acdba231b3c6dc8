"""Initial RAM disks: the "newc" form of cpio, as the kernel's ``buffer-format`` document defines it."""

from __future__ import annotations

import stat
from dataclasses import dataclass, field

_TRAILER = "TRAILER!!!"


@dataclass(slots=True)
class Archive:
    """Collects entries; :meth:`content` is what the kernel unpacks.

    Where nothing else is said they belong to root and have no date.
    """

    _parts: list[bytes] = field(default_factory=list)
    _entries: int = 0

    def directory(self, name: str) -> None:
        self.add(name, stat.S_IFDIR | 0o755)

    def file(self, name: str, content: bytes, *, executable: bool = False) -> None:
        self.add(name, stat.S_IFREG | (0o755 if executable else 0o644), content)

    def symlink(self, name: str, target: str) -> None:
        self.add(name, stat.S_IFLNK | 0o777, target.encode())

    def character_device(self, name: str, major: int, minor: int) -> None:
        self.add(name, stat.S_IFCHR | 0o600, device=(major, minor))

    def add(
        self,
        name: str,
        mode: int,
        content: bytes = b"",
        *,
        owner: tuple[int, int] = (0, 0),
        modified: int = 0,
        device: tuple[int, int] = (0, 0),
    ) -> None:
        """Any entry. *mode* holds its type as well, *owner* is a user's and a group's number, *modified* in seconds."""
        self._entries += 1
        self._parts.append(_entry(name, self._entries, mode, content, owner, modified, device))

    def content(self) -> bytes:
        """The archive with its end mark."""
        return b"".join([*self._parts, _entry(_TRAILER, 0, 0, b"", (0, 0), 0, (0, 0))])


def _entry(
    name: str,
    inode: int,
    mode: int,
    content: bytes,
    owner: tuple[int, int],
    modified: int,
    device: tuple[int, int],
) -> bytes:
    path = name.encode() + b"\0"
    links, on_major, on_minor, checksum = 1, 0, 0, 0
    numbers = (
        inode, mode, *owner, links, modified, len(content), on_major, on_minor, *device, len(path), checksum,
    )  # fmt: skip
    header = b"070701" + b"".join(b"%08x" % number for number in numbers)
    return _padded(header + path) + _padded(content)


def _padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % 4)
