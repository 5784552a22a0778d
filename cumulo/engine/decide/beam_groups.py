"""Beams as sequences: plays BeamSearch's decisions on the scheduler's sequences. Called when a step's
result is entered.

Every live beam is a sequence of its own. When all of a request's beams have been computed, the best
continuations are chosen: a parent's first child goes on in its place, further children share its blocks
(copy-on-write), childless beams end.
"""

from cumulo.engine.decide.beam import BeamSearch
from cumulo.engine.decide.books import Books
from cumulo.engine.decide.request import Request, Sequence, State
from cumulo.engine.decide.residency import new_slot


def start_beam(request: Request) -> None:
    params = request.params
    assert params.beam_width is not None
    request.beam = BeamSearch(
        width=params.beam_width,
        n=params.n,
        length_penalty=params.length_penalty,
        stop_ids=request.stop_ids,
        max_tokens=request.output_limit,
    )
    _one_token_at_a_time(request.sequences[0])


def advance_beams(books: Books, request: Request, now_s: float) -> None:
    """If all beams have candidates, choose the next generation; otherwise wait for the rest."""
    beam, live = request.beam, [s for s in request.sequences if s.state != State.FINISHED]
    assert beam is not None
    if any(sequence.candidates is None for sequence in live):
        return
    step = beam.advance([sequence.candidates or [] for sequence in live])
    if request.story.first_token_s is None:
        request.story.first_token_s = now_s
        request.story.add(now_s, "first_token")
    for sequence in live:
        sequence.candidates = None
    if step.done:
        for sequence in live:
            books.finish(sequence, "stop", now_s)
        return
    parents = [live[index] for index in step.parents]
    for sequence in live:
        if sequence not in parents:
            _drop(books, sequence)
    generation: list[Sequence] = []
    for index, parent in enumerate(parents):
        # Forks before take-overs: a parent must not have grown when its other children are made.
        if parent in parents[:index]:
            generation.append(_fork(books, parent, index))
        else:
            generation.append(parent)
    for index, (sequence, token) in enumerate(zip(generation, step.tokens, strict=True)):
        sequence.tokens.append(token)
        sequence.sample_index = index
        _one_token_at_a_time(sequence)
        _restate(books, sequence)
    request.sequences = generation


def _drop(books: Books, sequence: Sequence) -> None:
    """A beam without children: its blocks go, its slot stays with the request."""
    slot = books.remove(sequence)
    if slot is not None:
        sequence.request.reserved_slots.append(slot)


def _fork(books: Books, parent: Sequence, sample_index: int) -> Sequence:
    """A second child: shares the parent's blocks if those are here and a slot is, else waits."""
    twin = parent.fork(sample_index)
    if parent.state == State.RUNNING and parent.request.reserved_slots:
        books.residency.seat_twin(twin)
        books.add_running(twin)
    else:
        twin.blocks, twin.capacity, twin.computed, twin.lost = [], 0, 0, twin.computed
        books.queue.park(twin)
    return twin


def _restate(books: Books, sequence: Sequence) -> None:
    """A beam was given its next token: tell the runner, or queue it if it has to wait."""
    if sequence.state == State.RUNNING:
        books.next_plan.begin.append(new_slot(sequence))
    else:
        books.queue.push(sequence)


def _one_token_at_a_time(sequence: Sequence) -> None:
    """A beam's next token is not the one drawn but the one chosen: never plan past a draw in flight."""
    sequence.limit = len(sequence.tokens) + 1
