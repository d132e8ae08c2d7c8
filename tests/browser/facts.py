"""Numbers of the runs that pages.py makes."""

WORLD, STOPPED = 8, 5
RANKS, SAVES, PER_MACHINE = 8960, 100, 8
SLOW_SAVE, SLOW_RANK = 57, 137
STAGE, TENSOR = RANKS // 16, 4
