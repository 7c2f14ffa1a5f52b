import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_common.buddy import Buddy

SMALLEST = 16
#: Each step allocates so many bytes, or frees the block with that number (modulo those in use).
steps = st.lists(st.tuples(st.booleans(), st.integers(1, 700)), max_size=60)
sizes = st.integers(1, 100).map(lambda n: n * SMALLEST)


@given(sizes, steps)
def test_blocks_never_overlap_and_all_merge_again(size: int, plan: list[tuple[bool, int]]) -> None:
    buddy = Buddy(size, SMALLEST)
    whole = buddy.largest_free
    assert whole == buddy.largest
    blocks: dict[int, int] = {}
    for take, n in plan:
        if take:
            room = buddy.largest_free
            offset = buddy.alloc(n)
            if offset is None:
                assert n > room
                continue
            assert n <= room
            nbytes = buddy.nbytes_of(offset)
            assert n <= nbytes <= max(SMALLEST, 2 * n - 1)
            assert offset % nbytes == 0
            assert 0 <= offset <= size - nbytes
            assert all(offset + nbytes <= o or o + b <= offset for o, b in blocks.items())
            blocks[offset] = nbytes
        elif blocks:
            offset = list(blocks)[n % len(blocks)]
            assert buddy.free(offset) == blocks.pop(offset)
        assert buddy.used == sum(blocks.values())
    for offset, nbytes in blocks.items():
        assert buddy.free(offset) == nbytes
    assert buddy.used == 0
    assert buddy.largest_free == whole


def test_every_byte_can_be_had_in_smallest_blocks() -> None:
    buddy = Buddy(13 * SMALLEST, SMALLEST)
    offsets = {buddy.alloc(1) for _ in range(13)}
    assert offsets == {n * SMALLEST for n in range(13)}
    assert buddy.alloc(1) is None
    assert buddy.largest_free == 0
    assert buddy.used == buddy.size


def test_what_was_freed_last_is_used_first() -> None:
    buddy = Buddy(1 << 20)
    kept, freed = buddy.alloc(4096), buddy.alloc(4096)
    assert kept is not None
    assert freed is not None
    other = buddy.alloc(4096)
    assert other is not None
    buddy.free(freed)
    assert buddy.alloc(4096) == freed


def test_a_block_is_freed_once() -> None:
    buddy = Buddy(1 << 20)
    offset = buddy.alloc(5000)
    assert offset is not None
    assert buddy.free(offset) == 8192
    with pytest.raises(ValueError, match="no block begins"):
        buddy.free(offset)
    with pytest.raises(ValueError, match="no block begins"):
        buddy.free(4096)
    assert buddy.used == 0


@pytest.mark.parametrize(("size", "smallest"), [(0, 16), (24, 16), (48, 24), (8, 16)])
def test_impossible_sizes_are_refused(size: int, smallest: int) -> None:
    with pytest.raises(ValueError, match="multiple of|power of two"):
        Buddy(size, smallest)


def test_nothing_is_no_block() -> None:
    with pytest.raises(ValueError, match="cannot allocate"):
        Buddy(4096).alloc(0)
