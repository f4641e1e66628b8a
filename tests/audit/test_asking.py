"""What commands ask a lake with."""

from __future__ import annotations

from pathlib import Path

from tests.support.configurations import settings_for
from watersmeet.commands.asking import evaluator
from watersmeet.engine.choice import open_engine
from watersmeet.lake.epochs import begin_epoch
from watersmeet.run import create_missing


def test_expressions_of_an_epoch_that_has_ended_are_evaluated_too(tmp_path: Path) -> None:
    before, now = settings_for(tmp_path, publish__valid="size(orders) > 0"), settings_for(tmp_path)
    engine = open_engine(now)
    create_missing(engine)
    assert evaluator(engine.reader, now) is None
    for number, settings in enumerate((before, now)):
        begin_epoch(engine.reader, engine.append, settings, number, 0)
    assert evaluator(engine.reader, now) is not None
