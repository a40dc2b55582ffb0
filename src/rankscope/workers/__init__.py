"""One pool of worker processes, for sweeps (`engine`), trainings, and packages that build on rankscope."""

from rankscope.workers.pool import PieceResult, run_pieces, worker_index
from rankscope.workers.threads import cores, environment, threads_set

__all__ = ["PieceResult", "cores", "environment", "run_pieces", "threads_set", "worker_index"]
