"""The watch reports a collective that does not end, once, and no other."""

import threading

from shardglass.engine.watch import Watch


class FakeWork:
    def __init__(self, *, done):
        self.done = done

    def is_completed(self):
        return self.done


def test_a_collective_that_does_not_end_is_reported_once_with_its_age():
    reports, seen = [], threading.Event()

    def report(what, age):
        reports.append((what, age))
        seen.set()

    watch = Watch(0.1, report)
    watch.add("all-gather of layers.0", [FakeWork(done=True)])
    watch.add("reduce-scatter of layers.1", [FakeWork(done=True), FakeWork(done=False)])
    assert seen.wait(10)
    seen.clear()
    assert not seen.wait(0.3)
    watch.close()
    assert [what for what, _ in reports] == ["reduce-scatter of layers.1"]
    assert reports[0][1] > 0.1
