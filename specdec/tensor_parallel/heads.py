"""Which attention heads a rank has: whole GQA groups, zero-padded, to any degree.

Letters: H query heads, G key/value heads, P ranks, q = H / G query heads per group.
"""

from __future__ import annotations

from dataclasses import dataclass

from specdec.tensor_parallel.cuts import Piece


@dataclass(frozen=True, slots=True)
class HeadSplit:
    """The heads of one rank.

    Groups (a key/value head and its query heads) are dealt out in order, as many to each rank;
    what is missing is padded with groups of zeros (SwiftSpec section 4), whose output projection is
    zero too, so that they add nothing. Where there are at least twice as many ranks as groups, a
    group is split first: its parts hold the same key/value head and a share of its query heads.

    Attributes:
        query: pieces of the query heads, in heads; padded ones are zeros.
        key_value: pieces of the key/value heads.
        group_size: query heads per key/value head on every rank.
    """

    query: tuple[Piece, ...]
    key_value: tuple[Piece, ...]
    group_size: int

    @staticmethod
    def of(num_heads: int, num_kv_heads: int, *, rank: int, size: int) -> HeadSplit:
        """The share of ``rank``.

        Args:
            num_heads: H, a multiple of G.
            num_kv_heads: G.
            rank, size: place in the group, and P.
        """
        per_group = num_heads // num_kv_heads
        parts = min(max(1, size // num_kv_heads), per_group)  # of each group
        width = -(-per_group // parts)
        per_rank = -(-num_kv_heads * parts // size)
        query, key_value = [], []
        for number in range(rank * per_rank, (rank + 1) * per_rank):
            group, part = divmod(number, parts)
            if group >= num_kv_heads:
                query.append(Piece(0, 0, width))
                key_value.append(Piece(0, 0, 1))
                continue
            first = group * per_group + min(part * width, per_group)
            last = group * per_group + min((part + 1) * width, per_group)
            query.append(Piece(first, last, width - (last - first)))
            key_value.append(Piece(group, group + 1, 0))
        return HeadSplit(tuple(query), tuple(key_value), width)
