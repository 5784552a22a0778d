"""What a request is promised on arrival, and where it stands in the queue for it. Called by the scheduler."""

from cumulo.engine.decide.books import Books
from cumulo.engine.decide.request import Request
from cumulo.engine.decide.slo.door import look_ahead, refuse
from cumulo.engine.decide.slo.promise import Promise
from cumulo.engine.decide.slo.promises import Promises
from cumulo.spec.slo import Slo


def promise(books: Books, request: Request) -> None:
    """Promise the request what it asks for or what is usual here; raises Overloaded where that cannot be kept."""
    config, now_s = books.config, request.arrived_s
    if books.promises is None:
        books.promises = Promises(config.slo)
        books.queue.by_order = True
    promises, story = books.promises, request.story
    # One that is less important than usual is promised only what it asks for: batches wait until there is time.
    usual = config.slo if request.priority <= 0 else None
    slo = usual if request.slo is None else request.slo.with_rest_of(usual)
    tokens = request.prompt_length
    begun = request.sequences[0].output_length > 0  # another engine let it in
    if slo is not None and not request.sends and not begun:
        story.promise = Promise.from_slo(slo)
        # By deadline. Without a promise it is as if one priority lower.
        ttft_s = slo.ttft_s if slo.ttft_s is not None else config.priority_step_s
        order, number = request.order
        request.order = (order + ttft_s, number)
        outlook = look_ahead(books, promises, request, now_s)
        tokens = outlook.own_tokens
        if outlook.kept:
            story.add(
                now_s, "promised", promise=_words(slo), expected_ms=1e3 * outlook.ttft_s, ahead=outlook.ahead
            )
        elif config.late == "refuse":
            promises.refused += 1
            raise refuse(outlook, slo.ttft_s)
        else:
            story.promise = None
            request.order = (order + config.priority_step_s, number)
            story.add(now_s, "not_promised", why=outlook.why)
    elif not begun:
        request.order = (request.order[0] + config.priority_step_s, request.order[1])
    promises.add(request, tokens)


def _words(slo: Slo) -> str:
    return " and ".join(f"{name.upper()} {1e3 * bound:.0f} ms" for name, bound in slo.bounds.items())
