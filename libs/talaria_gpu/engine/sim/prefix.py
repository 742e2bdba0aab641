"""A radix cache of token prefixes, as a real engine keeps one: exact, page-aligned, locked by running calls, LRU.

A prefix is the codes of its whole pages, one after the other: `PageCode` makes them. An edge holds many pages, so that
a growing session costs one node per turn and matching is a handful of memory compares.
"""

from __future__ import annotations

import heapq
import itertools
import struct
from array import array
from dataclasses import dataclass, field

ID_BYTES = 4
_HASHED_TOKENS = 16


class PageCode:
    """What stands for a page of tokens: small pages themselves, larger ones a 64-bit hash.

    So a simulation of many sessions needs little memory. Two pages of one hash would be taken for one: in 10^9 pages
    that happens with a chance of 3%.
    """

    def __init__(self, page_tokens: int) -> None:
        self.page_tokens = page_tokens
        self._page_bytes = page_tokens * ID_BYTES
        self._split = struct.Struct(f"{self._page_bytes}s") if page_tokens >= _HASHED_TOKENS else None
        self.size = self._page_bytes if self._split is None else 8
        """Bytes of one code."""

    def of(self, packed: bytes) -> bytes:
        """Codes of the whole pages of packed ids."""
        whole = packed[: len(packed) - len(packed) % self._page_bytes]
        return whole if self._split is None else array("q", map(hash, self._split.iter_unpack(whole))).tobytes()


@dataclass(slots=True, eq=False)
class Node:
    """An edge and what hangs below it. `locks` counts the running calls whose prefix goes through here.

    A root has no parent; nor has a node that was evicted.
    """

    edge: bytes
    tokens: int
    """Of this edge alone."""
    parent: Node | None
    used: float
    locks: int = 0
    children: dict[bytes, Node] = field(default_factory=dict)


def depth(node: Node) -> int:
    """Tokens from the root to the end of `node`."""
    total, at = 0, node
    while at.parent is not None:
        total += at.tokens
        at = at.parent
    return total


class PrefixCache:
    """The prefixes of one model, by salt. `tokens` is what they occupy, in KV rows. Prefixes are codes (`PageCode`)."""

    def __init__(self, code: PageCode) -> None:
        self._code = code.size
        self._page_tokens = code.page_tokens
        self._roots: dict[str, Node] = {}
        self.tokens = 0
        self.locked_tokens = 0

    def match(self, salt: str, codes: bytes, now: float | None = None) -> tuple[Node, int]:
        """The node where the longest cached prefix of `codes` ends, and its length, tokens; with `now`, it is used."""
        node = self._root(salt)
        position = 0
        while True:
            child = node.children.get(codes[position : position + self._code])
            if child is None:
                break
            if now is not None:
                child.used = now
            common = self._common(child.edge, codes, position)
            if common < len(child.edge):
                child = self._split(child, common)
            node, position = child, position + common
        return node, self._tokens(position)

    def use(self, node: Node, now: float) -> None:
        """`node` and all above it are used."""
        at: Node | None = node
        while at is not None:
            at.used = now
            at = at.parent

    def length(self, salt: str, codes: bytes) -> int:
        """Tokens of the longest cached prefix of `codes`; changes nothing."""
        node = self._roots.get(salt)
        position = 0
        while node is not None:
            node = node.children.get(codes[position : position + self._code])
            if node is None:
                break
            common = self._common(node.edge, codes, position)
            position += common
            if common < len(node.edge):
                break
        return self._tokens(position)

    def insert(self, salt: str, codes: bytes, now: float) -> tuple[Node, int]:
        """Keep `codes`; returns the node where they end, and how many tokens are new."""
        node, have = self.match(salt, codes, now)
        rest = codes[have // self._page_tokens * self._code :]
        if not rest:
            return node, 0
        leaf = Node(rest, self._tokens(len(rest)), node, now)
        node.children[rest[: self._code]] = leaf
        self.tokens += leaf.tokens
        return leaf, leaf.tokens

    def lock(self, node: Node) -> None:
        """Keep `node` and all above it until `unlock`."""
        self._walk(node, 1)

    def unlock(self, node: Node) -> None:
        """Give back one `lock`."""
        self._walk(node, -1)

    def evict(self, tokens: int) -> int:
        """Free at least `tokens` rows of unlocked prefixes, least recently used leaves first; returns how many."""
        serial = itertools.count()  # breaks ties, in an order that is the same in every run
        leaves = [(n.used, next(serial), n) for n in self._nodes() if not n.children and not n.locks]
        heapq.heapify(leaves)
        freed = 0
        while leaves and freed < tokens:
            _, _, leaf = heapq.heappop(leaves)
            freed += leaf.tokens
            parent, leaf.parent = leaf.parent, None
            if parent is None:
                raise ValueError("a root is no leaf")
            del parent.children[leaf.edge[: self._code]]
            if parent.parent is not None and not parent.children and not parent.locks:
                heapq.heappush(leaves, (parent.used, next(serial), parent))
        self.tokens -= freed
        return freed

    def flush(self) -> None:
        """Forget everything; nothing may be locked."""
        if self.locked_tokens:
            raise ValueError(f"{self.locked_tokens} tokens are locked")
        for node in self._nodes():
            node.parent = None
        self._roots.clear()
        self.tokens = 0

    def check(self) -> str:
        """What is wrong inside ("" if nothing): counts against the tree."""
        nodes = list(self._nodes())
        total = sum(n.tokens for n in nodes)
        locked = sum(n.tokens for n in nodes if n.locks)
        if total != self.tokens or locked != self.locked_tokens:
            return f"prefix cache counts {self.tokens} tokens, {self.locked_tokens} locked; it holds {total}, {locked}"
        return ""

    def _tokens(self, size: int) -> int:
        return size // self._code * self._page_tokens

    def _root(self, salt: str) -> Node:
        root = self._roots.get(salt)
        if root is None:
            root = self._roots[salt] = Node(b"", 0, None, 0.0)
        return root

    def _common(self, edge: bytes, codes: bytes, position: int) -> int:
        """Bytes that `edge` and `codes` from `position` share, in whole pages (at least one is known to be)."""
        if codes.startswith(edge, position):
            return len(edge)
        low, high = 1, len(edge) // self._code  # pages known to match; pages known not to
        while high - low > 1:
            middle = (low + high) // 2
            if codes.startswith(edge[: middle * self._code], position):
                low = middle
            else:
                high = middle
        return low * self._code

    def _split(self, node: Node, at: int) -> Node:
        """Cut `node`'s edge after `at` bytes; returns the upper half."""
        parent = node.parent
        if parent is None:
            raise ValueError("a root has no edge")
        upper = Node(node.edge[:at], self._tokens(at), parent, node.used, node.locks)
        parent.children[upper.edge[: self._code]] = upper
        node.edge, node.tokens, node.parent = node.edge[at:], node.tokens - upper.tokens, upper
        upper.children[node.edge[: self._code]] = node
        return upper

    def _walk(self, node: Node, by: int) -> None:
        at: Node | None = node
        while at is not None and at.parent is not None:
            was = at.locks
            at.locks += by
            if at.locks < 0:
                raise ValueError("unlocked more often than locked")
            if (was == 0) != (at.locks == 0):
                self.locked_tokens += at.tokens if by > 0 else -at.tokens
            at = at.parent

    def _nodes(self) -> list[Node]:
        out: list[Node] = []
        todo = [child for root in self._roots.values() for child in root.children.values()]
        while todo:
            node = todo.pop()
            out.append(node)
            todo.extend(node.children.values())
        return out
