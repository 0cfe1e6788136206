"""The page, the metrics and the probes of a run, over HTTP on loopback: `outlast serve`. No torch.

It needs the extra `serve` (starlette, uvicorn). This room must never write to a run, never let a reader hold anything,
and never answer a request that was not made to this machine's own name. Read `_board.py` first (who reads the journals
and when), then `_app.py` (who answers).
"""

from outlast.observe.web._app import build_app
from outlast.observe.web._board import Board
from outlast.observe.web._metrics import metrics_text
from outlast.observe.web._server import PORT, Serving, listen
from outlast.observe.web._wishes import Wishes

__all__ = ["PORT", "Board", "Serving", "Wishes", "build_app", "listen", "metrics_text"]
