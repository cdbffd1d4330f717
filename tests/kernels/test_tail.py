"""The end of a round: what is accepted, what is appended, and what the host is told."""

from __future__ import annotations

import pytest
import torch

from outrider.kernels.tail import accept_and_commit, accept_and_commit_reference, pack_and_commit

pytest.importorskip("triton")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SLOTS, WIDTH = 6, 24
IDLE = SLOTS - 1
NAN = float("nan")


def state(lengths: list[int], limit: int = WIDTH) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, lengths and limits; the idle slot last."""
    tokens = -torch.ones(SLOTS, WIDTH, dtype=torch.long, device=DEVICE)
    known = torch.tensor([*lengths, *[1] * (SLOTS - len(lengths))], device=DEVICE)
    return tokens, known, torch.full((SLOTS,), limit, device=DEVICE)


def run(choice, guesses, guess_lengths, index, after, best=None) -> list[list[int]]:
    choice = torch.tensor(choice, device=DEVICE)
    guesses = torch.tensor(guesses, dtype=torch.long, device=DEVICE).view(len(choice), -1)
    best = torch.zeros(choice.shape, device=DEVICE) if best is None else torch.tensor(best, device=DEVICE)
    lengths, index = torch.tensor(guess_lengths, device=DEVICE), torch.tensor(index, device=DEVICE)
    return accept_and_commit(choice, best, guesses, lengths, index, *after).tolist()


def test_guesses_are_kept_while_they_equal_the_choice() -> None:
    after = tokens, lengths, _ = state([3, 5, 4])
    packed = run([[7, 8, 9], [7, 8, 9], [7, 8, 9]], [[7, 8], [7, 1], [2, 8]], [2, 2, 2], [0, 2, 1], after)
    assert packed == [[7, 8, 9, 2, 2, 0], [7, 8, 9, 1, 2, 0], [7, 8, 9, 0, 2, 0]]
    assert lengths.tolist() == [6, 6, 6, 1, 1, 1]
    assert tokens[:3, 3:7].tolist() == [[7, 8, 9, -1], [-1, -1, 7, -1], [-1, 7, 8, -1]]


def test_guesses_beyond_a_rows_count_are_not_looked_at() -> None:
    after = _, lengths, _ = state([3])
    assert run([[7, 8, 9]], [[7, 8]], [1], [0], after) == [[7, 8, 9, 1, 1, 0]]
    assert lengths[0] == 5


def test_a_round_without_guesses_commits_one_token() -> None:
    after = tokens, lengths, _ = state([3, 2])
    assert run([[7], [8]], [[], []], [0, 0], [1, 0], after) == [[7, 0, 0, 0], [8, 0, 0, 0]]
    assert (tokens[1, 2], tokens[0, 3], lengths.tolist()) == (7, 8, [4, 3, 1, 1, 1, 1])


@pytest.mark.parametrize(("limit", "committed"), [(3, 0), (2, 0), (4, 1), (5, 2), (6, 3), (99, 3)])
def test_a_row_never_passes_its_limit(limit: int, committed: int) -> None:
    after = tokens, lengths, _ = state([3], limit)
    assert run([[7, 8, 9]], [[7, 8]], [2], [0], after) == [[7, 8, 9, 2, 2, 0]]
    assert lengths[0] == 3 + committed
    assert tokens[0, 3:7].tolist() == [7, 8, 9][:committed] + [-1] * (4 - committed)


def test_a_row_never_passes_the_buffer() -> None:
    after = tokens, lengths, _ = state([WIDTH - 1], WIDTH + 9)
    run([[7, 8, 9]], [[7, 8]], [2], [0], after)
    assert lengths[0] == WIDTH
    assert tokens[0, -1] == 7
    assert bool((tokens[1:] == -1).all())


def test_the_idle_slot_stays_as_it_is_however_often_it_is_named() -> None:
    after = tokens, lengths, _ = state([3])
    packed = run([[7, 8]] * 3, [[7]] * 3, [1] * 3, [IDLE, 0, IDLE], after, [[NAN, NAN], [0.0, 0.0], [NAN, NAN]])
    assert [row[-1] for row in packed] == [0, 0, 0]
    assert lengths.tolist() == [5, 1, 1, 1, 1, 1]
    assert bool((tokens[IDLE] == -1).all())


def test_only_committed_tokens_can_be_broken() -> None:
    best = [[0.0, NAN, 0.0], [0.0, 0.0, NAN], [NAN, 0.0, 0.0]]
    packed = run([[7, 8, 9]] * 3, [[7, 8], [7, 1], [7, 8]], [2, 2, 2], [0, 1, 2], state([3, 3, WIDTH]), best)
    assert [row[-1] for row in packed] == [1, 0, 0]


@pytest.mark.parametrize("seed", range(12))
def test_the_kernel_and_torch_agree_over_random_rounds(seed: int) -> None:
    random = torch.Generator().manual_seed(seed)

    def below(high: int, *shape: int) -> torch.Tensor:
        return torch.randint(high, shape, generator=random).to(DEVICE)

    rows, num_guesses = int(below(8, 1)) + 1, seed % 6
    slots = torch.cat([torch.randperm(IDLE, generator=random), torch.full((8,), IDLE)]).to(DEVICE)
    index = slots[torch.randperm(min(rows + 2, len(slots)), generator=random)[:rows]]
    wide = below(3, rows, num_guesses + 3)
    choice, guesses = wide[:, : num_guesses + 1], below(3, rows, num_guesses)
    best = torch.where(below(5, rows, num_guesses + 1) == 0, NAN, 1.0)
    guess_lengths = below(num_guesses + 1, rows)
    tokens, lengths, limits = below(9, SLOTS, WIDTH), below(WIDTH, SLOTS) + 1, below(WIDTH + 4, SLOTS) + 1
    lengths[IDLE] = 1
    ours, theirs = (tokens.clone(), lengths.clone(), limits), (tokens.clone(), lengths.clone(), limits)
    packed = accept_and_commit(choice, best, guesses, guess_lengths, index, *ours)
    assert torch.equal(packed, accept_and_commit_reference(choice, best, guesses, guess_lengths, index, *theirs))
    assert torch.equal(ours[0], theirs[0])
    assert torch.equal(ours[1], theirs[1])


def test_other_verifiers_pack_and_commit_the_same_way() -> None:
    after = tokens, lengths, _ = state([3, 4])
    chosen = torch.tensor([[7, 8, 9], [5, 6, 4]], device=DEVICE)
    index = torch.tensor([1, 0], device=DEVICE)
    accepted, counted = torch.tensor([2, 0], device=DEVICE), torch.tensor([2, 1], device=DEVICE)
    packed = pack_and_commit(chosen, accepted, counted, torch.tensor([False, True], device=DEVICE), index, *after)
    assert packed.tolist() == [[7, 8, 9, 2, 2, 0], [5, 6, 4, 0, 1, 1]]
    assert lengths.tolist() == [4, 7, 1, 1, 1, 1]
    assert tokens[:2, 3:8].tolist() == [[5, -1, -1, -1, -1], [-1, 7, 8, 9, -1]]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a card")
@pytest.mark.parametrize("tail", [accept_and_commit, accept_and_commit_reference])
def test_a_captured_graph_commits_again_and_again(tail) -> None:
    after = tokens, lengths, _ = state([3, 3])
    choice = torch.tensor([[7, 8], [7, 8]], device=DEVICE)
    given = choice, torch.zeros(2, 2, device=DEVICE), choice[:, :1].clone(), torch.ones_like(choice[:, 0])
    index = torch.tensor([0, IDLE], device=DEVICE)
    tail(*given, index, *after)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        packed = tail(*given, index, *after)
    for turn in range(3):
        graph.replay()
        assert lengths[0] == 7 + 2 * turn
    assert packed[0].tolist() == [7, 8, 1, 1, 0]
    assert tokens[0, 3:11].tolist() == [7, 8] * 4
