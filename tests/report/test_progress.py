import io
import threading

from rich.console import Console

from lemon_jax.report import RunProgress
from lemon_jax.report.progress import clock_text, facts_text


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def plain_progress():
    out, clock = io.StringIO(), Clock()
    return RunProgress(Console(file=out, width=80), clock=clock), out, clock


def test_a_plain_line_a_step():
    progress, out, clock = plain_progress()
    facts = {
        "reward": 1.02,
        "accuracy": 0.56,
        "invalid_rate": 0.0,
        "cost_per_task": 210.2,
        "worker_tokens": 3412,
    }
    with progress:
        progress.phase("training", 20, unit="step")
        for _ in range(7):
            clock.now += 12.1
            progress.advance(**facts)
    lines = out.getvalue().splitlines()
    assert len(lines) == 8
    assert lines[-1] == (
        "step  7/20  reward 1.02  acc 0.56  invalid 0 %  cost 210  worker tokens 3,412"
        "  12.1 s  about 2:37 left"
    )


def test_time_left_follows_recent_steps():
    progress, out, clock = plain_progress()
    progress.phase("training", 40, unit="step")
    for i in range(20):
        clock.now += 100.0 if i == 0 else 10.0  # the first one compiles
        progress.advance(reward=1.0)
    left = out.getvalue().splitlines()[-1].rpartition("about ")[2]
    minutes, seconds = left.removesuffix(" left").split(":")
    assert 200 <= int(minutes) * 60 + int(seconds) < 210


def test_fast_units_share_a_line_and_the_last_one_shows():
    progress, out, clock = plain_progress()
    progress.phase("evaluation: lemon", 50)
    for _ in range(50):
        clock.now += 0.5
        progress.advance()
    lines = out.getvalue().splitlines()
    assert len(lines) <= 6
    assert lines[-1].startswith("evaluation: lemon 50/50")


def test_download_lines_are_few():
    progress, out, clock = plain_progress()
    for i in range(0, 491_000_001, 100_000):
        clock.now += 0.01
        progress.download(i, 491_000_000, "small model")
    lines = out.getvalue().splitlines()
    assert len(lines) <= 7
    assert lines[-1] == "small model 491/491 MB"
    assert "left" in lines[1]


def test_a_download_that_begins_anew_is_followed():
    progress, out, clock = plain_progress()
    for done in (50, 90, 0, 40, 100):
        clock.now += 11
        progress.download(done * 1_000_000, 100_000_000, "m")
    assert out.getvalue().splitlines()[-1] == "m 100/100 MB"


def test_nothing_raises(monkeypatch):
    class Broken(io.StringIO):
        def write(self, text):
            raise BrokenPipeError

    monkeypatch.setattr("sys.stderr", Broken())
    for progress in (RunProgress(), plain_progress()[0]):
        with progress:
            progress.advance()
            progress.phase("[/bold]", -3)
            progress.advance(0, reward=None, odd=object(), kl=float("nan"))
            progress.advance("x")  # type: ignore[arg-type]
            progress.note("\x1b[2J[red]")
            progress.download(1, 0, "zero")
            progress.download(None, None, None)  # type: ignore[arg-type]


def test_errors_of_the_work_pass_through():
    try:
        with plain_progress()[0]:
            raise ZeroDivisionError
    except ZeroDivisionError:
        return
    raise AssertionError


def test_bars_on_a_terminal():
    out = io.StringIO()
    with RunProgress(
        Console(file=out, width=120, force_terminal=True, _environ={"TERM": "xterm"})
    ) as progress:
        progress.phase("training", 4)
        progress.advance(reward=1.25)
        progress.note("a note [not markup]")
        progress.download(5_000_000, 10_000_000, "model")
    text = out.getvalue()
    assert "a note [not markup]" in text
    assert "reward 1.25" in text
    assert "1/4" in text


def test_many_threads_count_right():
    progress, out, _ = plain_progress()
    progress.phase("evaluation", 400)
    threads = [threading.Thread(target=lambda: [progress.advance() for _ in range(100)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert "400/400" in out.getvalue()


def test_texts():
    assert [clock_text(s) for s in (160.4, 3725, -1)] == ["2:40", "1:02:05", "0:00"]
    assert facts_text({"reward": 1.02, "invalid_rate": 0.0, "kl": None, "mode": "cf"}) == (
        "reward 1.02  invalid 0 %  mode cf"
    )
