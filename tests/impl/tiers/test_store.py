"""The tiered store: it keeps the blocks that the specification keeps, and handles bad files."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from blockstep.impl.engine import FolderError, TieredStore
from blockstep.impl.tiers.files import MARK, BlockKV
from blockstep.impl.tiers.order import TierOrder
from blockstep.spec.features import tiers as spec


def block(number: int) -> BlockKV:
    return torch.full((2, 3), number, dtype=torch.bfloat16), torch.tensor(
        [number], dtype=torch.int8
    )


def names(*numbers: int) -> list[bytes]:
    return [bytes([number]) for number in numbers]


def numbers(blocks: list[BlockKV]) -> list[int]:
    for one in blocks:
        assert torch.equal(one[0], block(int(one[1]))[0])
    return [int(one[1]) for one in blocks]


def save(store: TieredStore, *kept: int, first: int = 0) -> None:
    store.save(names(*kept), first, [block(number) for number in kept[first:]])


def list_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.kv*"))


@pytest.fixture
def store(tmp_path: Path) -> Iterator[TieredStore]:
    one = TieredStore(2, 2, tmp_path)
    yield one
    one.close()


def test_blocks_move_down_when_a_tier_is_full_and_up_when_loaded(
    store: TieredStore, tmp_path: Path
) -> None:
    save(store, 1, 2)
    save(store, 3, 4)
    assert (store.count_by_tier(), len(list_files(tmp_path))) == ((2, 2), 2)
    assert numbers(store.load(names(1, 2, 3))) == [1, 2, 3]
    assert (store.num_host_hits, store.num_file_hits) == (1, 2)
    assert (store.count_by_tier(), len(list_files(tmp_path))) == ((2, 2), 2)
    save(store, 5)
    assert [store.count(names(one)) for one in (1, 2, 3, 4, 5)] == [1, 1, 1, 0, 1]


def put_a_folder(path: Path) -> None:
    """Replace a file by a folder."""
    path.unlink()
    path.mkdir()


SPOIL: dict[str, Callable[[Path], object]] = {
    "missing": Path.unlink,
    "empty": lambda path: path.write_bytes(b""),
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"\0"),
    "a bit": lambda path: path.write_bytes(
        path.read_bytes()[:-1] + bytes([path.read_bytes()[-1] ^ 1])
    ),
    "checksum": lambda path: path.write_bytes(b"\0" * 32 + path.read_bytes()[32:]),
    "a folder": put_a_folder,
}


@pytest.mark.parametrize("spoil", SPOIL.values(), ids=SPOIL)
def test_an_unreadable_block_is_lost_and_ends_the_hit(
    store: TieredStore, tmp_path: Path, spoil: Callable[[Path], object]
) -> None:
    save(store, 1, 2)
    save(store, 3, 4)
    known = store._files
    assert known is not None
    spoil(known._get_path(names(2)[0]))
    assert store.count(names(1, 2, 3)) == 3
    assert numbers(store.load(names(1, 2, 3))) == [1]
    assert [store.count(names(one)) for one in (1, 2, 3, 4)] == [1, 0, 1, 1]
    assert store.num_lost == 1
    save(store, 1, 2, first=1)
    assert numbers(store.load(names(1, 2))) == [1, 2]


def test_a_file_with_the_content_of_another_block_is_not_read(store: TieredStore) -> None:
    save(store, 1, 2)
    save(store, 3, 4)
    assert store._files is not None
    one, other = (store._files._get_path(name) for name in names(1, 2))
    one.write_bytes(other.read_bytes())
    assert store.load(names(1)) == []


def test_fewer_blocks_are_kept_on_a_full_disk(
    store: TieredStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = Path.write_bytes

    def fill(path: Path, data: bytes) -> int:
        write(path, data[:40])
        raise OSError(28, "No space left on device")

    save(store, 1, 2)
    monkeypatch.setattr(Path, "write_bytes", fill)
    save(store, 3, 4)
    assert (store.count_by_tier(), store.num_lost, list_files(tmp_path)) == ((2, 0), 2, [])
    assert numbers(store.load(names(3, 4))) == [3, 4]
    monkeypatch.setattr(Path, "write_bytes", write)
    save(store, 5, 6)
    assert numbers(store.load(names(3, 4))) == [3, 4]


def test_clear_removes_all_blocks_and_their_files(store: TieredStore, tmp_path: Path) -> None:
    save(store, 1, 2)
    save(store, 3, 4)
    store.clear()
    assert (len(store), list_files(tmp_path), store.load(names(1))) == (0, [], [])
    save(store, 1, 2, 3)
    assert numbers(store.load(names(1, 2, 3))) == [1, 2, 3]


def test_a_folder_is_used_by_one_store_at_a_time(store: TieredStore, tmp_path: Path) -> None:
    with pytest.raises(FolderError, match="a store is using it"):
        TieredStore(1, 1, tmp_path)
    save(store, 1, 2)
    save(store, 3, 4)
    store.close()
    save(store, 1)
    assert (len(store), store.load(names(1))) == (0, [])
    (tmp_path / ("0" * 64 + ".kv")).write_bytes(b"of a process that was killed")
    (tmp_path / "notes").write_bytes(b"mine")
    other = TieredStore(1, 1, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted((MARK, "notes"))
    assert other.load(names(3)) == []
    other.close()


def test_a_folder_with_other_files_is_rejected_and_unchanged(tmp_path: Path) -> None:
    (tmp_path / "notes").write_bytes(b"mine")
    with pytest.raises(FolderError, match="no store has made it"):
        TieredStore(1, 1, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes"]


@pytest.mark.parametrize("capacities", [(-1, 0), (1, -1), (True, 0), (1.0, 0)])
def test_bad_arguments_are_rejected(capacities: tuple[int, int], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="must be whole numbers"):
        TieredStore(*capacities, tmp_path)
    with pytest.raises(ValueError, match="need a folder"):
        TieredStore(1, 1)


def test_count_is_none_while_announced_blocks_are_missing(store: TieredStore) -> None:
    save(store, 1)
    store.expect(names(1, 2), is_coming=True)
    assert (store.count(names(1)), store.count(names(1, 2))) == (1, None)
    store.expect(names(1, 2), is_coming=False)
    assert store.count(names(1, 2)) == 1


TEXTS = st.lists(st.integers(0, 11), min_size=1, max_size=6, unique=True)


class Beside(RuleBasedStateMachine):
    """The store and the specification's tiers get the same random calls."""

    @initialize(host=st.integers(0, 4), file=st.integers(0, 4))
    def begin(self, host: int, file: int) -> None:
        self.place = TemporaryDirectory()
        self.folder = Path(self.place.name)
        self.store = TieredStore(host, file, self.folder)
        self.spec = spec.create_tiers((host, file))

    @rule(text=TEXTS, first=st.integers(0, 6))
    def keep(self, text: list[int], first: int) -> None:
        first = min(first, spec.count_held(self.spec, names(*text)))
        save(self.store, *text, first=first)
        self.spec = spec.keep(self.spec, names(*text), first)

    @rule(text=TEXTS, spoilt=st.sets(st.integers(0, 11)))
    def fetch(self, text: list[int], spoilt: set[int]) -> None:
        unreadable = {*names(*spoilt)} & {*self.spec.tiers[1]}
        assert self.store._files is not None
        for name in unreadable & {*names(*text)}:
            path = self.store._files._get_path(name)
            path.write_bytes(path.read_bytes()[:-1])
        self.spec, found = spec.fetch(self.spec, names(*text), unreadable)
        assert [bytes([one]) for one in numbers(self.store.load(names(*text)))] == list(found)
        for name in unreadable & {*names(*text)} & {*self.spec.tiers[1]}:  # behind the lost one
            self.store._files.write(name, block(name[0]))

    @rule()
    def clear(self) -> None:
        self.store.clear()
        self.spec = spec.clear(self.spec)

    @invariant()
    def are_alike(self) -> None:
        if hasattr(self, "store"):
            assert self.store._order.list_tiers() == self.spec.tiers
            assert set(self.store._blocks) == set(self.spec.tiers[0])
            assert len(list_files(self.folder)) == len(self.spec.tiers[1])
            for name in chain(*self.spec.tiers):
                assert isinstance(name, bytes)
                assert self.store.count([name]) == 1

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.store.close()
            self.place.cleanup()


Beside.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
TestBeside = Beside.TestCase


@pytest.mark.parametrize("capacities", [(2, 0, 3), (1, 1, 1), (0,), (3,)])
def test_any_number_of_tiers_has_the_order_of_the_specification(
    capacities: tuple[int, ...],
) -> None:
    draw = torch.Generator().manual_seed(1)
    order, machine = TierOrder(capacities), spec.create_tiers(capacities)
    for step in range(400):
        text = names(*torch.randperm(9, generator=draw)[: 1 + step % 4].tolist())
        if step % 3:
            order.keep(text, 0)
            machine = spec.keep(machine, text)
        else:
            machine, found = spec.fetch(machine, text)
            order.fetch(found)
        assert order.list_tiers() == machine.tiers
