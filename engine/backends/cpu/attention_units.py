"""The attention instructions, divided into units of work (see `units`): rope and KV store, attention, and merging.

A tile is up to QUERIES consecutive tokens of one request. A divided tile is one unit per KV head and piece of its
context. The MERGE instruction after it combines the partial results, which have a slot for each token. A whole tile is
one unit per KV head and needs no slots. The bits of both are the same. Everything here is compiled and takes the words
of an instruction and of the step header. Nothing is checked here: `program` has already checked all addresses.
"""

from engine.backends.cpu.attention import (
    PIECE,
    QUERIES,
    SCORE_ROW,
    HeadBlocks,
    attend_piece,
    attend_tile,
    first_visible,
    tokens_of_piece,
)
from engine.backends.cpu.instructions import ONE_BITS, TILE_WORDS, WHOLE, Record
from engine.backends.cpu.kv_store import rotate, store_key_value
from engine.backends.cpu.partials import merge_partials, partial_bytes
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
    slots, positions = h.slots + a.group * h.slot_group, _positions(a, h)
    for unit in range(first, last):
        m, head = unit // a.kv_heads, unit % a.kv_heads
        row, position = a.x + m * a.x_stride, word(positions, m)
        angles = position * a.rotary_dim * 2  # offset in bytes: a position has rotary_dim / 2 float32
        cosine, sine = a.cosine + angles, a.sine + angles
        for query in range(head * a.heads, (head + 1) * a.heads):
            if a.q_norm != 0:
                _normalize(a, row + query * size, a.q_norm + query * a.norm_stride)
            rotate(row + query * size, cosine, sine, a.head_dim, a.rotary_dim, a.distance, a.scale, a.interleaved)
        if a.queries_only:
            continue
        key = row + (queries + head) * size
        if a.k_norm != 0:
            _normalize(a, key, a.k_norm + head * a.norm_stride)
        rotate(key, cosine, sine, a.head_dim, a.rotary_dim, a.distance, ONE_BITS, a.interleaved)
        value, slot = key + a.kv_heads * size, word(slots, m)
        if a.v_norm != 0:
            _normalize(a, value, a.v_norm)
        block = a.cache + slot // BLOCK_SIZE * a.block_bytes + head * a.head_bytes
        store_key_value(a.kernel, key, value, block, slot % BLOCK_SIZE, a.head_dim)


@jit
def _reads_outputs(a: Record) -> bool:
    """Whether the rows of x are output rows, rather than tokens."""
    return bool(a.selected) and not a.gather


@jit
def _positions(a: Record, h: Record) -> int:
    """Return the address of the positions of the rows of x."""
    return h.output_positions if _reads_outputs(a) else h.positions


@jit
def _count_tiles(a: Record, h: Record) -> int:
    return h.output_tiles if _reads_outputs(a) else h.tiles


@jit
def _tile(a: Record, h: Record, number: int) -> tuple[int, int, int, int]:
    """Return a tile's first row, number of rows, request, and first slot."""
    at = (h.output_tile_list if _reads_outputs(a) else h.tile_list) + 8 * TILE_WORDS * number
    return word(at, 0), word(at, 1), word(at, 2), word(at, 3)


@jit
def _pieces(a: Record, h: Record, token: int, tokens: int) -> tuple[int, int]:
    """Return the first piece that consecutive tokens of a request see, and the number of pieces from there on."""
    position = word(_positions(a, h), token)
    first = first_visible(position, a.window) // PIECE
    return first, (position + tokens - 1) // PIECE + 1 - first


@jit
def _partial(a: Record, slot: int, head: int, piece: int) -> int:
    """Return the address of the partial results of a KV head's query heads for one piece."""
    at: int = a.partials + ((slot * a.kv_heads + head) * a.max_pieces + piece) * a.heads * partial_bytes(a.head_dim)
    return at


@jit
def _units(a: Record, h: Record, number: int) -> int:
    token, tokens, _, slot = _tile(a, h, number)
    return a.kv_heads * (1 if slot == WHOLE else _pieces(a, h, token, tokens)[1])


@jit
def count_attend_units(a: Record, h: Record) -> int:
    """Count the units of ATTEND: one per KV head for a whole tile, one per KV head and piece for a divided tile."""
    units = 0
    for number in range(_count_tiles(a, h)):
        units += _units(a, h, number)
    return units


@jit
def attend(a: Record, h: Record, first: int, last: int, scratch: int) -> None:
    """Compute units of ATTEND."""
    unit = 0
    for number in range(_count_tiles(a, h)):
        here = _units(a, h, number)
        for i in range(max(0, first - unit), min(here, last - unit)):
            _attend_unit(a, h, number, i % a.kv_heads, i // a.kv_heads, scratch)
        unit += here
        if unit >= last:
            return


@jit
def _attend_unit(a: Record, h: Record, number: int, head: int, piece: int, scratch: int) -> None:
    """Compute attention of a tile for one KV head, over the whole context or over the piece with this index."""
    token, tokens, request, slot = _tile(a, h, number)
    position, offset = word(_positions(a, h), token), head * a.heads * a.head_dim * 4
    q, table = a.x + token * a.x_stride + offset, h.tables + a.group * h.table_group + request * h.table_stride
    cache = a.cache + head * a.head_bytes
    sinks = a.sinks + 4 * head * a.heads if a.sinks != 0 else 0
    kv = HeadBlocks(cache, a.block_bytes, a.head_dim, a.window, a.softcap, sinks, a.scores, a.softmax, a.weighted_sum)
    if slot == WHOLE:
        out = a.out + token * a.out_stride + offset
        partials = scratch + QUERIES * SCORE_ROW
        attend_tile(q, a.x_stride, a.heads, position, tokens, table, kv, scratch, partials, out, a.out_stride)
        return
    piece += _pieces(a, h, token, tokens)[0]
    partial, start = _partial(a, slot, head, piece), piece * PIECE
    table += start // BLOCK_SIZE * 8
    size = partial_bytes(a.head_dim)
    if tokens == 1:
        attend_piece(a.heads, q, 4 * a.head_dim, position + 1 - start, 0, table, kv, scratch, partial, size)
        return
    stride = _partial(a, slot + 1, head, piece) - partial
    row, stop = tokens_of_piece(position, tokens, start, a.window)
    for member in range(a.heads):
        attend_piece(
            stop - row, q + row * a.x_stride + member * 4 * a.head_dim, a.x_stride, position + row + 1 - start, 1,
            table, kv, scratch, partial + row * stride + member * size, stride,
        )  # fmt: skip


@jit
def _tile_of(a: Record, h: Record, token: int) -> int:
    """Return the index of the tile that contains a row, by binary search: tiles are sorted by their first rows."""
    first, last = 0, _count_tiles(a, h)
    while last - first > 1:
        middle = (first + last) // 2
        if _tile(a, h, middle)[0] <= token:
            first = middle
        else:
            last = middle
    return first


@jit
def _merge_token(a: Record, h: Record, token: int, out: int, scratch: int) -> None:
    """Write the row of a token in the form that its reader needs. The pieces of a divided tile are combined first."""
    size = 4 * a.head_dim
    partial_size = partial_bytes(a.head_dim)
    first_token, _, _, slot = _tile(a, h, _tile_of(a, h, token))
    row = a.x + token * a.x_stride
    if slot != WHOLE:
        row = scratch + partial_size
        first, pieces = _pieces(a, h, token, 1)
        for query in range(a.kv_heads * a.heads):
            head, member = query // a.heads, query % a.heads
            partial = _partial(a, slot + token - first_token, head, first) + member * partial_size
            sink = a.sinks + 4 * query if a.sinks != 0 else 0
            merge_partials(partial, a.heads * partial_size, pieces, a.head_dim, sink, scratch, row + query * size)
    write_row(a.kernel, row, a.groups, out)


@jit
def merge(a: Record, h: Record, first: int, last: int, copy: int, scratch: int) -> None:
    """Compute units of MERGE. A unit is a token, or an output row if the `gather` word is set."""
    for unit in range(first, last):
        token, out = word(h.output_rows, unit) if a.gather else unit, a.out + unit * a.out_stride + copy * a.out_copy
        _merge_token(a, h, token, out, scratch)
