"""Tokenize for longer than the timeout of the process group."""

import time

import accel_ddp
from accel_ddp.config.train_config import TrainConfig
from accel_ddp.entry import run


def main(cfg: TrainConfig) -> None:
    import datasets

    from accel_ddp.sources import places

    places.REPORT_AFTER = 2  # 10 s is too long for a test
    accelerator = accel_ddp.start(cfg)

    def slow(rows):
        time.sleep(8)
        print(f"tokenized {len(rows['text'])} rows")
        return {"n": [len(text) for text in rows["text"]]}

    with accel_ddp.together("tokenize"):
        rows = datasets.Dataset.from_dict({"text": ["a", "bb", "ccc"]})
        done = accel_ddp.tokenization.map_once(rows, slow, depends_on=None, cfg=cfg)
    accelerator.wait_for_everyone()
    print(f"rank {accelerator.process_index} received {list(done['n'])}")


if __name__ == "__main__":
    run(TrainConfig, main)
