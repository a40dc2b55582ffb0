"""One pool of worker processes, for sweeps (`engine`), trainings, and packages that build on rankscope."""

from rankscope.workers.pool import PieceResult, cores, environment, run_pieces, threads_set, worker_index

__all__ = ["PieceResult", "cores", "environment", "run_pieces", "threads_set", "worker_index"]
