"""Write blocks until killed, and print a line for each written batch. Arguments: SEED FOLDER."""

import random
import sys
from pathlib import Path

from engine.kv.disk.segment_file import SEGMENT_BLOCKS
from tests.engine.kv.disk.known_blocks import SIZES, filled, keys_of, new_store


def main() -> None:
    seed, root = int(sys.argv[1]), Path(sys.argv[2])
    chance, store = random.Random(seed), new_store(root)
    segment = 0
    while True:
        name = f"{seed} {segment}"
        keys = keys_of(name)
        done = 0
        while done < SEGMENT_BLOCKS:
            stop = min(SEGMENT_BLOCKS, done + chance.randrange(1, 20))
            for group in range(len(SIZES)):
                store.write(group, keys[0], filled(keys[done:stop], group))
            done = stop
            print(segment, done, flush=True)
        segment += 1


if __name__ == "__main__":
    main()
