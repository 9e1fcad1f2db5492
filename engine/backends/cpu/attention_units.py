"""The attention instructions, divided into units of work (see `units`): rope and KV store, attention, and merging.

A tile is up to QUERIES consecutive tokens of one request. A tile of several tokens is one unit per KV head. The context
of a single token is divided into pieces, which are separate units; the MERGE instruction after it combines them.
Everything here is compiled and takes the words of an instruction and of the step header. Nothing is checked here:
`program` has already checked all addresses.
"""

from engine.backends.cpu.attention import (
    PIECE,
    QUERIES,
    SCORE_ROW,
    HeadBlocks,
    attend_piece,
    attend_tile,
    first_visible,
)
from engine.backends.cpu.kv_store import rotate, store_key_value
from engine.backends.cpu.partials import PARTIAL_TAIL, merge_partials
from engine.backends.cpu.program import ONE_BITS, Record
from engine.config import BLOCK_SIZE
from quant.cpu.activations import FORM_KERNELS, GROUP, Form, write_row
from quant.cpu.kernel import jit, word
from quant.cpu.norms import layer_norm_row, norm_factor

_scale_floats = FORM_KERNELS[Form.FLOAT].scale_row


@jit
def _normalize(a: Record, x: int, weight: int) -> None:
    """Normalize one head in place: by layer norm if `centered` is set, otherwise by its root mean square."""
    groups = a.head_dim // GROUP
    if a.centered:
        layer_norm_row(x, weight, groups, a.epsilon, x)
    else:
        _scale_floats(x, norm_factor(x, groups, a.epsilon), weight, groups, x)


@jit
def rope_store(a: Record, h: Record, first: int, last: int) -> None:
    """Compute units of ROPE_STORE: one KV head of one token, with its query heads. Row x holds q, k, and v."""
    size, queries = 4 * a.head_dim, a.kv_heads * a.heads
    slots = h.slots + a.group * h.slot_group
    for unit in range(first, last):
        m, head = unit // a.kv_heads, unit % a.kv_heads
        row, position, slot = a.x + m * a.x_stride, word(h.positions, m), word(slots, m)
        angles = position * a.rotary_dim * 2  # offset in bytes: a position has rotary_dim / 2 float32
        cosine, sine = a.cosine + angles, a.sine + angles
        for query in range(head * a.heads, (head + 1) * a.heads):
            if a.q_norm != 0:
                _normalize(a, row + query * size, a.q_norm + query * a.norm_stride)
            rotate(row + query * size, cosine, sine, a.head_dim, a.rotary_dim, a.scale, a.interleaved)
        key = row + (queries + head) * size
        if a.k_norm != 0:
            _normalize(a, key, a.k_norm + head * a.norm_stride)
        rotate(key, cosine, sine, a.head_dim, a.rotary_dim, ONE_BITS, a.interleaved)
        block = a.cache + slot // BLOCK_SIZE * a.block_bytes + head * a.head_bytes
        store_key_value(a.kernel, key, key + a.kv_heads * size, block, slot % BLOCK_SIZE, a.head_dim)


@jit
def _pieces(a: Record, h: Record, tile: int) -> int:
    """Return the number of pieces in the context of a single-token tile; 0 for a tile of several tokens."""
    if word(h.tile_list, 3 * tile + 1) > 1:
        return 0
    position = word(h.positions, word(h.tile_list, 3 * tile))
    pieces: int = position // PIECE + 1 - first_visible(position, a.window) // PIECE
    return pieces


@jit
def count_attend_units(a: Record, h: Record) -> int:
    """Count the units of ATTEND: one per KV head for a tile of several tokens, one per KV head and piece for a single
    token.
    """
    units = 0
    for tile in range(h.tiles):
        units += max(1, _pieces(a, h, tile))
    return units * a.kv_heads


@jit
def attend(a: Record, h: Record, first: int, last: int, scratch: int) -> None:
    partial_size = 4 * a.head_dim + PARTIAL_TAIL
    unit, tables = 0, h.tables + a.group * h.table_group
    for tile in range(h.tiles):
        at = h.tile_list + 24 * tile
        token, tokens, request = word(at, 0), word(at, 1), word(at, 2)
        pieces, position = _pieces(a, h, tile), word(h.positions, token)
        here, table = max(1, pieces) * a.kv_heads, tables + request * h.table_stride
        for i in range(max(0, first - unit), min(here, last - unit)):
            head, piece = i % a.kv_heads, i // a.kv_heads
            q = a.x + token * a.x_stride + head * a.heads * a.head_dim * 4
            cache = a.cache + head * a.head_bytes
            kv = HeadBlocks(
                cache, a.block_bytes, a.head_dim, a.window, a.softcap, a.scores, a.softmax, a.weighted_sum
            )  # fmt: skip
            if pieces == 0:
                out = a.out + token * a.out_stride + head * a.heads * a.head_dim * 4
                partials = scratch + QUERIES * SCORE_ROW
                attend_tile(
                    q, a.x_stride, a.heads, position, tokens, table, kv, scratch, partials, out, a.out_stride
                )  # fmt: skip
            else:
                start = (first_visible(position, a.window) // PIECE + piece) * PIECE
                partial = a.partials + ((request * a.kv_heads + head) * a.max_pieces + piece) * a.heads * partial_size
                blocks = table + start // BLOCK_SIZE * 8
                attend_piece(
                    a.heads, q, 4 * a.head_dim, position + 1 - start, 0, blocks, kv, scratch, partial, partial_size
                )
        unit += here
        if unit >= last:
            return


@jit
def _tile_of(h: Record, token: int) -> int:
    """Return the index of the tile that contains a token, by binary search: tiles are sorted by token."""
    first, last = 0, h.tiles
    while last - first > 1:
        middle = (first + last) // 2
        if word(h.tile_list, 3 * middle) <= token:
            first = middle
        else:
            last = middle
    return first


@jit
def _merge_token(a: Record, h: Record, tile: int, m: int, out: int, scratch: int) -> None:
    """Write the row of token `m` in the form that its reader needs.

    If the token is the only one in its tile, its pieces are combined first.
    """
    size = 4 * a.head_dim
    partial_size = size + PARTIAL_TAIL
    request, pieces = word(h.tile_list, 3 * tile + 2), _pieces(a, h, tile)
    row = a.x + m * a.x_stride
    if pieces > 0:
        row = scratch + partial_size
        for query in range(a.kv_heads * a.heads):
            head, member = query // a.heads, query % a.heads
            partial = a.partials + ((request * a.kv_heads + head) * a.max_pieces * a.heads + member) * partial_size
            merge_partials(partial, a.heads * partial_size, pieces, a.head_dim, scratch, row + query * size)
    write_row(a.kernel, row, a.groups, out)


@jit
def merge(a: Record, h: Record, first: int, last: int, copy: int, scratch: int) -> None:
    """Compute units of MERGE. A unit is a tile, or an output row if the `gather` word is set."""
    for unit in range(first, last):
        if a.gather:
            token, out = word(h.output_rows, unit), a.out + unit * a.out_stride + copy * a.out_copy
            _merge_token(a, h, _tile_of(h, token), token, out, scratch)
            continue
        token, tokens = word(h.tile_list, 3 * unit), word(h.tile_list, 3 * unit + 1)
        for m in range(token, token + tokens):
            _merge_token(a, h, unit, m, a.out + m * a.out_stride + copy * a.out_copy, scratch)
