"""Little loops, and which of their variables are carried from step to step and steer the training.

A loop is the body of `for step in training.steps(until=9):`, unless it has a header of its own; `STEP` marks the
line that asks for the next step.
"""

from __future__ import annotations

import textwrap

import pytest

from outlast.runtime.checks._carried_variables import Carried, carried_in

CARRIED = {
    "a count": ("n", "loss", """
        n += 1
        for batch in step:
            step.backward(loss_of(batch) * (1 + 0.1 * n))
    """),
    "a count of microbatches": ("n", "loss", """
        for batch in step:
            n = n + 1
            scale = 1 / n
            step.backward(loss_of(batch) * scale)
    """),
    "the last output": ("prev", "loss", """
        for batch in step:
            out = model(batch)
            loss = out.sum()
            if prev is not None:
                loss = loss + (out - prev).pow(2).mean()
            step.backward(loss)
            prev = out.detach()
    """),
    "a count that decides": ("it", "loss", """
        for batch in step:
            loss = loss_of(batch)
            if it > 100:
                loss = loss + aux(batch)
            step.backward(loss)
        it += 1
    """),
    "a rate by a count": ("n", "learning rate", """
        lr = base * decay ** n
        for g in optimizer.param_groups:
            g["lr"] = lr
        for batch in step:
            step.backward(loss_of(batch))
        n += 1
    """),
    "a rate that decays": ("lr", "learning rate", """
        lr *= 0.99
        optimizer.param_groups[0]["lr"] = lr
        for batch in step:
            step.backward(loss_of(batch))
    """),
    "a setting of another name": ("m", "settings", """
        m = min(m + 0.01, 0.99)
        for i, group in enumerate(optimizer.param_groups):
            group["momentum"] = m
        for batch in step:
            step.backward(loss_of(batch))
    """),
    "patience by hand": ("bad best", "learning rate", """
        for batch in step:
            step.backward(loss_of(batch))
        if step.loss < best:
            best, bad = step.loss, 0
        else:
            bad += 1
        if bad > 3:
            for g in optimizer.param_groups:
                g["lr"] *= 0.5
            bad = 0
    """),
    "two that follow each other": ("a b", "loss", """
        for batch in step:
            step.backward(loss_of(batch) * a)
        a, b = b, a + b
    """),
    "an attribute": ("self.n", "loss", """
        for batch in step:
            step.backward(self.loss(batch) * self.n)
        self.n += 1
    """),
    "an item": ("state['n']", "loss", """
        for batch in step:
            step.backward(loss_of(batch) * state["n"])
        state["n"] += 1
    """),
    "by a walrus": ("n", "loss", """
        for batch in step:
            if (n := n + 1) > 5:
                step.backward(loss_of(batch) * 2)
            else:
                step.backward(loss_of(batch))
    """),
    "a flag": ("warm", "loss", """
        for batch in step:
            loss = loss_of(batch)
            if warm:
                loss = loss * 0.1
            step.backward(loss)
        if step.loss < 1.0:
            warm = False
    """),
    "a flag of a step": ("late", "loss", """
        if step.number == 100:
            late = True
        for batch in step:
            step.backward(loss_of(batch) + aux(batch) if late else loss_of(batch))
    """),
    "a hidden state": ("h", "loss", """
        for x, y in step:
            out, h = model(x, h)
            h = h.detach()
            step.backward(criterion(out, y))
    """),
    "an average of the loss that weighs": ("ema", "loss", """
        for batch in step:
            step.backward(loss_of(batch) / ema)
        ema = 0.9 * ema + 0.1 * step.loss
    """),
    "in place": ("center", "loss", """
        for batch in step:
            out = model(batch)
            step.backward(dino(out, center))
            with torch.no_grad():
                center.mul_(0.9).add_(out.mean(0), alpha=0.1)
    """),
    "a bank": ("bank", "loss", """
        for x, index in step:
            out = model(x)
            step.backward(contrast(out, bank))
            bank[index] = out.detach()
    """),
    "a list": ("history", "loss", """
        for batch in step:
            step.backward(loss_of(batch) * (0.5 if history[-1] > 2 else 1.0))
        history.append(step.loss)
    """),
    "skipped by a count": ("n", "loss", """
        for batch in step:
            n += 1
            if n % 7 == 0:
                continue
            step.backward(loss_of(batch))
    """),
    "behind a function of its own": ("n", "loss", """
        def weighed(batch):
            return loss_of(batch) * n
        for batch in step:
            step.backward(weighed(batch))
        n += 1
    """),
    "through names in between": ("n", "loss", """
        w = ramp(n)
        for batch in step:
            a = loss_of(batch)
            b = a * w
            step.backward(b)
        m = n
        n = m + 1
    """),
    "the first output": ("ref", "loss", """
        for batch in step:
            out = model(batch)
            if ref is None:
                ref = out.detach()
            step.backward((out - ref).pow(2).mean())
    """),
    "since when": ("since", "loss", """
        if since is None and seen < 0.5:
            since = step.number
        for batch in step:
            step.backward(loss_of(batch) * (1 if since is None else step.number - since))
        seen = 0.3
    """),
    "a count by enumerate": ("i", "loss", """
        for i, step in enumerate(training.steps(until=9)):  # STEP
            for batch in step:
                step.backward(loss_of(batch) * i)
    """),
    "in an epoch": ("n", "loss", """
        for epoch in training.epochs(3):
            n = 0
            for step in tqdm(epoch):  # STEP
                for batch in step:
                    step.backward(loss_of(batch) * n)
                n += 1
    """),
    "from epoch to epoch": ("lr", "learning rate", """
        for epoch in training.epochs(3):
            for step in epoch:  # STEP
                for batch in step:
                    step.backward(loss_of(batch))
            lr = lr * 0.5
            for g in optimizer.param_groups:
                g["lr"] = lr
    """),
    "a loop with next": ("n", "loss", """
        steps = iter(training.steps(until=9))
        while True:
            step = next(steps, None)  # STEP
            if step is None:
                break
            for batch in step:
                step.backward(loss_of(batch) * n)
            n += 1
    """),
    "in a method": ("n", "loss", """
        class Trainer:
            def fit(self):
                n = 0
                for step in self.training.steps(until=9):  # STEP
                    for batch in step:
                        (self.loss(batch) * n).backward()
                    n += 1
    """),
    "to a pipeline": ("n", "loss", """
        for batch in step:
            step.pipeline(schedule, batch[0] * n, target=batch[1])
        n += 1
    """),
}  # fmt: skip

QUIET = {
    "nothing": """
        for batch in step:
            step.backward(loss_of(batch))
    """,
    "a count for the log": """
        for batch in step:
            step.backward(loss_of(batch))
        it += 1
        if it % 10 == 0:
            print(it, step.loss)
    """,
    "an average for the log, by the loss's name": """
        for batch in step:
            loss = loss_of(batch)
            step.backward(loss)
            running = 0.9 * running + 0.1 * loss.item()
        loss = running / 10
        total += loss
    """,
    "a timer and a bar": """
        for batch in step:
            step.backward(loss_of(batch))
        took, t0 = time.time() - t0, time.time()
        bar.update(1)
        bar.set_postfix(took=took)
    """,
    "early stopping": """
        for batch in step:
            step.backward(loss_of(batch))
        if step.loss < best:
            best, bad = step.loss, 0
        else:
            bad += 1
        if bad > 3:
            training.stop("no better")
    """,
    "a break": """
        if bad > 3:
            break
        for batch in step:
            step.backward(loss_of(batch))
        bad += step.loss > best
    """,
    "evaluation by a count": """
        if iter_num % 100 == 0:
            losses = evaluate()
            if losses["val"] < best_val:
                best_val = losses["val"]
                save(iter_num)
        for batch in step:
            step.backward(loss_of(batch))
        iter_num += 1
    """,
    "a rate of the step": """
        lr = get_lr(step.number)
        for g in optimizer.param_groups:
            g["lr"] = lr
        for batch in step:
            step.backward(loss_of(batch))
    """,
    "a rate from the rate": """
        for g in optimizer.param_groups:
            g["lr"] = g["lr"] * 0.99
        for batch in step:
            step.backward(loss_of(batch))
    """,
    "metrics": """
        for batch in step:
            out = model(batch)
            n += 1
            step.metric("n", n)
            step.backward(out.sum())
    """,
    "summed in a step": """
        total = 0
        for batch in step:
            loss = loss_of(batch)
            total = total + loss.item()
            step.backward(loss / (1 + 0 * total))
    """,
    "under the same condition": """
        for batch in step:
            if step.number > 100:
                extra = aux(batch)
            loss = loss_of(batch)
            if step.number > 100:
                loss = loss + extra
            step.backward(loss)
    """,
    "by either branch": """
        for batch in step:
            if step.number % 2:
                w = 0.5
            else:
                w = 1.0
            step.backward(loss_of(batch) * w)
    """,
    "made once": """
        for batch in step:
            if mask is None:
                mask = torch.ones(batch.shape, device=batch.device)
            step.backward((model(batch) * mask).sum())
    """,
    "made once, in a table": """
        for batch in step:
            size = 8
            if size not in masks:
                masks[size] = make(size)
            step.backward((model(batch) * masks[size]).sum())
    """,
    "a flag of what is made once": """
        for batch in step:
            if first:
                first = False
                table = make()
            step.backward((model(batch) * table).sum())
    """,
    "put back at the end": """
        for batch in step:
            parts.append(loss_of(batch))
            step.backward(sum(parts))
            parts.clear()
    """,
    "set to the same at the end": """
        for batch in step:
            acc = acc + loss_of(batch)
            step.backward(acc)
            acc = 0.0
    """,
    "an old epoch": """
        if step.epoch != epoch:
            epoch = step.epoch
            w = weight(epoch)
        w = weight(epoch)
        for batch in step:
            step.backward(loss_of(batch) * w)
    """,
    "a buffer written over": """
        for batch in step:
            noise.normal_()
            inputs["x"] = batch + noise
            step.backward(model(**inputs).sum())
    """,
    "a list filled anew": """
        for batch in step:
            for i, part in enumerate(parts):
                outs[i] = part(batch)
            step.backward(sum(outs))
    """,
    "by the batch": """
        for x, y in step:
            x, y = x.float(), y.long()
            with torch.autocast("cpu") as context:
                loss = criterion(model(x), y)
            step.backward(loss)
        last = x
    """,
    "a comprehension's own name": """
        for batch in step:
            step.backward(sum(loss_of(n) for n in batch))
        n += 1
    """,
    "an enumerated batch": """
        for i, batch in enumerate(step):
            step.backward(loss_of(batch))
        i += 1
    """,
    "an enumerated log": """
        for i, step in enumerate(training.steps(until=9)):  # STEP
            for batch in step:
                step.backward(loss_of(batch))
            print(i)
    """,
    "tried again": """
        for batch in step:
            try:
                loss = loss_of(batch)
            except ValueError:
                failures += 1
                loss = loss_of(batch[:1])
            step.backward(loss)
    """,
    "a file of logs": """
        for batch in step:
            step.backward(loss_of(batch))
        rows.append(step.loss)
        if run.is_writer and log is None:
            log = open("log", "w")
    """,
    "a backward behind the step's": """
        for batch in step:
            step.backward(loss_of(batch))
        seen.append(step.number)
        probe(batch).backward()
    """,
}  # fmt: skip


def found(loop: str) -> tuple[Carried, ...] | None:
    source = textwrap.dedent(loop)
    if "STEP" not in source:
        source = "for step in training.steps(until=9):  # STEP\n" + textwrap.indent(source, "    ")
    (line,) = [number for number, row in enumerate(source.splitlines(), 1) if "# STEP" in row]
    rows = carried_in(source, line)
    return rows if rows is None else tuple(row for row in rows if row.how != "read")


@pytest.mark.parametrize("name", CARRIED)
def test_what_is_carried_is_found(name: str) -> None:
    want, what, loop = CARRIED[name]
    rows = found(loop)
    assert rows is not None
    assert {row.name for row in rows} == set(want.split())
    assert all(row.what.endswith(what) for row in rows)


@pytest.mark.parametrize("name", QUIET)
def test_what_does_not_steer_is_not(name: str) -> None:
    assert found(QUIET[name]) == ()


def test_the_line_is_where_it_is_used() -> None:
    (row,) = found(CARRIED["a count"][2]) or ()
    assert (row.name, row.line, row.how) == ("n", 5, "carried")
    (row,) = found(CARRIED["a count by enumerate"][2]) or ()
    assert (row.name, row.how) == ("i", "counted")


@pytest.mark.parametrize(
    "loop",
    [
        "for item in bar:  # STEP\n    yield item",
        "x = next(steps)  # STEP",
        "for s in training.steps(9):  # STEP\n    f(s)",
    ],
)
def test_a_loop_that_does_not_train_is_none(loop: str) -> None:
    assert found(loop) is None


def test_what_draws_is_told_of_as_read() -> None:
    source = "for step in steps:\n    w = rng.random()\n    for b in step:\n        step.backward(f(b) * w)"
    assert ("rng", ".random") in {row.place for row in carried_in(source, 1) or () if row.how == "read"}


def test_many_branches_take_no_time() -> None:
    """Each of them doubles the ways through the turn."""
    rows = [f"        if step.number > {i}:\n            loss = loss + part{i} * {i}" for i in range(200)]
    body = "\n".join(
        ["for step in steps:", "    for b in step:", "        loss = f(b)", *rows, "        step.backward(loss)"]
    )
    assert all(row.how == "read" for row in carried_in(body, 1) or ())
