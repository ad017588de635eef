"""Python's own profiler: `python -m pstats rank-0.pstats` reads what it wrote."""

import cProfile


class Profiler:
    def __init__(self, folder, rank):
        self.path, self.profile = folder / f"rank-{rank}.pstats", cProfile.Profile()

    def start(self):
        self.profile.enable()

    def stop(self):
        self.profile.disable()
        self.profile.dump_stats(self.path)
