"""recipes/sft.py on 6 May 2031: chat templates and the recipe read this date. Tests of runs that are resumed on another day."""

import datetime
import runpy
from pathlib import Path

from transformers.utils import chat_template_utils

from accel_ddp.tasks import chat


class Day(datetime.date):
    @classmethod
    def today(cls) -> "Day":
        return cls(2031, 5, 6)


class Now(datetime.datetime):
    @classmethod
    def now(cls, tz: datetime.tzinfo | None = None) -> "Now":
        return cls(2031, 5, 6, tzinfo=tz)


chat.date, chat_template_utils.datetime = Day, Now
if __name__ == "__main__":
    runpy.run_path(str(Path(__file__).parents[2] / "recipes" / "sft.py"), run_name="__main__")
