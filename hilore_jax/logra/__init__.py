"""LoGRA: gradients kept as random low-rank sketches, steps of a predicted KL, packets."""

from hilore_jax.logra.follower import Follower as Follower
from hilore_jax.logra.follower import follow as follow
from hilore_jax.logra.kl import predicted_kl as predicted_kl
from hilore_jax.logra.kl import realized_kl as realized_kl
from hilore_jax.logra.linear import SketchKey as SketchKey
from hilore_jax.logra.linear import SketchSlot as SketchSlot
from hilore_jax.logra.linear import sketch_linears as sketch_linears
from hilore_jax.logra.merge import merge_factor as merge_factor
from hilore_jax.logra.message import GapError as GapError
from hilore_jax.logra.message import PacketError as PacketError
from hilore_jax.logra.message import SyncError as SyncError
from hilore_jax.logra.optimizer import logra as logra
from hilore_jax.logra.packet import FullSync as FullSync
from hilore_jax.logra.packet import Packet as Packet
from hilore_jax.logra.packet import read_message as read_message
from hilore_jax.logra.projection import projection as projection
from hilore_jax.logra.row_adam import row_adam as row_adam
from hilore_jax.logra.scale_by_logra import scale_by_logra as scale_by_logra
from hilore_jax.logra.sketch import sketched_dense as sketched_dense
from hilore_jax.logra.sketches import Sketches as Sketches
from hilore_jax.logra.socket_transport import SocketClient as SocketClient
from hilore_jax.logra.socket_transport import SocketServer as SocketServer
from hilore_jax.logra.step_control import kl_budget as kl_budget
from hilore_jax.logra.step_control import step_control as step_control
from hilore_jax.logra.sync import apply_packet as apply_packet
from hilore_jax.logra.sync import full_sync_bytes as full_sync_bytes
from hilore_jax.logra.sync import make_full_sync as make_full_sync
from hilore_jax.logra.sync import make_packet as make_packet
from hilore_jax.logra.sync import move_kernels as move_kernels
from hilore_jax.logra.sync import packet_bytes as packet_bytes
from hilore_jax.logra.transport import FileTransport as FileTransport

__all__ = [
    "FileTransport",
    "Follower",
    "FullSync",
    "GapError",
    "Packet",
    "PacketError",
    "SketchKey",
    "SketchSlot",
    "Sketches",
    "SocketClient",
    "SocketServer",
    "SyncError",
    "apply_packet",
    "follow",
    "full_sync_bytes",
    "kl_budget",
    "logra",
    "make_full_sync",
    "make_packet",
    "merge_factor",
    "move_kernels",
    "packet_bytes",
    "predicted_kl",
    "projection",
    "read_message",
    "realized_kl",
    "row_adam",
    "scale_by_logra",
    "sketch_linears",
    "sketched_dense",
    "step_control",
]
