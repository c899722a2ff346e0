"""Distribution of attention heads over ranks: GQA groups, zero-padded, for any number of ranks.

Shape letters: H query heads, G key/value heads, P ranks, q = H / G query heads per group.
"""

from __future__ import annotations

from dataclasses import dataclass

from specdec.tensor_parallel.cuts import Piece


@dataclass(frozen=True, slots=True)
class HeadSplit:
    """The heads of one rank.

    Groups (a key/value head and its query heads) are assigned in order, equally many per rank; the
    last ranks are padded with groups of zeros (SwiftSpec section 4), whose output projection is
    zero, so that they add nothing. With at least twice as many ranks as groups, each group is first
    split into parts with the same key/value head and a share of its query heads.

    Attributes:
        query: pieces of the query heads, counted in heads.
        key_value: pieces of the key/value heads, counted in heads.
        group_size: query heads per key/value head on every rank.
    """

    query: tuple[Piece, ...]
    key_value: tuple[Piece, ...]
    group_size: int

    @staticmethod
    def of(num_heads: int, num_kv_heads: int, *, rank: int, size: int) -> HeadSplit:
        """Returns the heads of ``rank``.

        Args:
            num_heads: H, a multiple of G.
            num_kv_heads: G.
            rank: rank within the group.
            size: P.
        """
        per_group = num_heads // num_kv_heads
        parts = min(max(1, size // num_kv_heads), per_group)  # per group
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
