"""What stands at the ports of a network: plain hosts, and servers with their inner fabrics.

A server puts its nodes into a layout and names the nodes that its cables to the network start at, its ports. Inner
links cost a path more than network links do where two ways would tie, so that NVLink is preferred to PCIe.

Rates are per direction and, but for NVLink's nominal 25 GB/s (50 for four links of the fourth generation's pairs),
those that NCCL's topology model assumes as reachable: PCIe 3.0 x16 12 GB/s, the inter-socket bus 10 GB/s (Skylake).
"""

import itertools
from typing import Annotated, Literal, TypeAlias, get_args

from pydantic import Field

from ._fields import Bytes, Count, Flops, Rate, RatesTable, ReductionField, ReductionTable, Seconds
from ._graph_builder import GraphBuilder

_PCIE_COST = 2


class _Server(RatesTable):
    def place(self, layout: GraphBuilder, name: str) -> list[int]:
        """Add one server's nodes, whose names begin with its own; return those to be cabled, one per port."""
        raise NotImplementedError

    @property
    def ports(self) -> int:
        """How many cables to the network it has."""
        return 1


class PlainHost(_Server):
    """A host that stands for its one device; or, with more ranks, one whose ranks share its memory and its port."""

    kind: Literal["host"] = "host"
    ranks: Count = Field(default=1, ge=1)
    memory: Bytes | None = None  # of the host; its ranks share it
    memory_bandwidth: Rate = 10e9
    memory_latency: Seconds = 200e-9

    def place(self, layout: GraphBuilder, name: str) -> list[int]:
        """Add the host, and its ranks if it has several."""
        if self.ranks == 1:
            node = layout.node(
                name,
                "host",
                host=name,
                memory_Bps=self.memory_bandwidth,
                memory_nbytes=self.memory or 0,
                rates=self.rates(),
            )
            layout.ranks.append(node)
            return [node]
        centre = layout.node(name, "memory", host=name)
        for rank in range(self.ranks):
            core = layout.node(
                f"{name}.rank{rank}",
                "device",
                host=name,
                memory_Bps=self.memory_bandwidth,
                memory_nbytes=(self.memory or 0) // self.ranks,
                rates=self.rates(),
            )
            layout.link(core, centre, self.memory_bandwidth, self.memory_latency)
            layout.ranks.append(core)
        return [centre]


class _DeviceServer(_Server):
    devices: Count = Field(default=8, ge=1)
    device_memory: Bytes | None = None
    device_memory_bandwidth: Rate | None = None
    pcie: Rate = 12e9
    pcie_latency: Seconds = 300e-9
    bus: Rate = 10e9
    bus_latency: Seconds = 300e-9

    @property
    def ports(self) -> int:
        """One NIC per device, where nothing else is said."""
        return self.devices

    def device(self, layout: GraphBuilder, name: str, index: int) -> int:
        node = layout.node(
            f"{name}.gpu{index}",
            "device",
            host=name,
            memory_Bps=self.device_memory_bandwidth or 0.0,
            memory_nbytes=self.device_memory or 0,
            rates=self.rates(),
        )
        layout.ranks.append(node)
        return node

    def sockets(self, layout: GraphBuilder, name: str) -> list[int]:
        cpus = [layout.node(f"{name}.cpu{socket}", "cpu", host=name) for socket in range(2)]
        layout.link(cpus[0], cpus[1], self.bus, self.bus_latency, _PCIE_COST)
        return cpus

    def all_devices(self, layout: GraphBuilder, name: str) -> list[int]:
        return [self.device(layout, name, index) for index in range(self.devices)]

    def mesh(self, layout: GraphBuilder, devices: list[int], rate_Bps: float, latency_s: float) -> None:
        """Join each of some devices to each other."""
        for a, b in itertools.combinations(devices, 2):
            layout.link(a, b, rate_Bps, latency_s)

    def pcie_link(self, layout: GraphBuilder, a: int, b: int) -> None:
        layout.link(a, b, self.pcie, self.pcie_latency, _PCIE_COST)

    def with_nics(
        self, layout: GraphBuilder, name: str, devices: list[int], cpus: list[int], sharers: int = 1
    ) -> list[int]:
        """Put each device, or as many as are `sharers`, and a NIC of its own under one PCIe switch; the NICs."""
        nics = []
        for index, first in enumerate(range(0, len(devices), sharers)):
            switch = layout.node(f"{name}.pcie{index}", "pcie", host=name)
            nic = layout.node(f"{name}.nic{index}", "nic", host=name)
            for end in (*devices[first : first + sharers], nic):
                self.pcie_link(layout, end, switch)
            self.pcie_link(layout, switch, cpus[first * len(cpus) // len(devices)])
            nics.append(nic)
        return nics


class CommodityServer(_DeviceServer):
    """Devices under PCIe switches, whose uplinks they share, and NICs at the root complex, which all share."""

    kind: Literal["commodity"] = "commodity"
    devices_per_switch: Count = Field(default=4, ge=1)
    nics: Count = Field(default=1, ge=1)

    @property
    def ports(self) -> int:
        """One per NIC."""
        return self.nics

    def place(self, layout: GraphBuilder, name: str) -> list[int]:
        """Add two sockets; PCIe switches and NICs are dealt to them in turn."""
        cpus = self.sockets(layout, name)
        for index in range(self.devices):
            if index % self.devices_per_switch == 0:
                group = index // self.devices_per_switch
                switch = layout.node(f"{name}.pcie{group}", "pcie", host=name)
                self.pcie_link(layout, switch, cpus[group % 2])
            self.pcie_link(layout, self.device(layout, name, index), switch)
        ports = []
        for index in range(self.nics):
            nic = layout.node(f"{name}.nic{index}", "nic", host=name)
            self.pcie_link(layout, nic, cpus[index % 2])
            ports.append(nic)
        return ports


class EflopsServer(_DeviceServer):
    """One NIC per device, both under one PCIe switch: traffic to the network never meets the root complex.

    Source: EFLOPS (HPCA 2020), abstract and public notes.
    """

    kind: Literal["eflops"] = "eflops"

    def place(self, layout: GraphBuilder, name: str) -> list[int]:
        """Add the devices with their NICs, and two sockets that join their switches."""
        cpus = self.sockets(layout, name)
        devices = self.all_devices(layout, name)
        return self.with_nics(layout, name, devices, cpus)


# DGX-1V's hybrid cube mesh: pairs with two NVLinks and with one; six links leave every device.
# Source: the link matrix in msccl-tools' description of the machine, as facts.
_DOUBLE = ((0, 1), (0, 4), (1, 3), (2, 3), (2, 6), (4, 5), (5, 7), (6, 7))
_SINGLE = ((0, 2), (0, 3), (1, 2), (1, 5), (3, 7), (4, 6), (4, 7), (5, 6))


class Dgx1(_DeviceServer):
    """Eight V100 in a hybrid cube mesh of NVLink 2, four EDR NICs, one for two devices under a PCIe switch."""

    kind: Literal["dgx1"] = "dgx1"
    devices: Count = Field(default=8, ge=8, le=8)
    flops: Flops | None = 15.7e12  # V100 SXM2, fp32, data sheet; what has no matrix units of its own is at this rate
    float16_flops: Flops | None = 125e12  # tensor cores, data sheet; they know neither bfloat16 nor TF32
    device_memory: Bytes | None = 16 * 2**30  # the smaller of the two that there are
    device_memory_bandwidth: Rate | None = 900e9
    nvlink: Rate = 25e9
    nvlink_latency: Seconds = 700e-9

    @property
    def ports(self) -> int:
        """Four NICs."""
        return 4

    def place(self, layout: GraphBuilder, name: str) -> list[int]:
        """Add the mesh; devices that no NVLink joins meet over PCIe, as devices do not forward."""
        cpus = self.sockets(layout, name)
        devices = self.all_devices(layout, name)
        for pairs, lanes in ((_DOUBLE, 2), (_SINGLE, 1)):
            for a, b in pairs:
                layout.link(devices[a], devices[b], lanes * self.nvlink, self.nvlink_latency)
        return self.with_nics(layout, name, devices, cpus, sharers=2)


class Ac922(_DeviceServer):
    """IBM's AC922: two POWER9, NVLink 2 from device to device and to the processor of a socket, a NIC port at each.

    The processors' X-bus has 64 GB/s per direction (vendor's figure).
    """

    kind: Literal["ac922"] = "ac922"
    devices: Count = Field(default=4, ge=2, le=6, multiple_of=2)
    flops: Flops | None = 15.7e12  # V100 SXM2, fp32, data sheet; what has no matrix units of its own is at this rate
    float16_flops: Flops | None = 125e12  # tensor cores, data sheet; they know neither bfloat16 nor TF32
    device_memory: Bytes | None = 16 * 2**30
    device_memory_bandwidth: Rate | None = 900e9
    nvlink: Rate = 75e9
    nvlink_latency: Seconds = 700e-9
    bus: Rate = 64e9
    pcie: Rate = 16e9  # PCIe 4.0 x8 for each of the NIC's two ports

    @property
    def ports(self) -> int:
        """One at each socket."""
        return 2

    def place(self, layout: GraphBuilder, name: str) -> list[int]:
        """Add two sockets, the first half of the devices at the first."""
        cpus = self.sockets(layout, name)
        devices = self.all_devices(layout, name)
        half = self.devices // 2
        ports = []
        for socket, cpu in enumerate(cpus):
            near = devices[socket * half : (socket + 1) * half]
            for index, device in enumerate(near):
                layout.link(device, cpu, self.nvlink, self.nvlink_latency)
                for other in near[index + 1 :]:
                    layout.link(device, other, self.nvlink, self.nvlink_latency)
            nic = layout.node(f"{name}.nic{socket}", "nic", host=name)
            self.pcie_link(layout, nic, cpu)
            ports.append(nic)
        return ports


class _NvSwitchServer(_DeviceServer):
    devices: Count = Field(default=8, ge=1, le=8)
    nvlink: Rate
    nvlink_latency: Seconds = 500e-9
    reduction: ReductionField = None

    def place(self, layout: GraphBuilder, name: str) -> list[int]:
        """Add the devices at one NVSwitch (its planes are striped, so they act as one), each with a NIC of its own."""
        cpus = self.sockets(layout, name)
        devices = self.all_devices(layout, name)
        capability = self.reduction.capability() if self.reduction else None
        switch = layout.node(f"{name}.nvswitch", "nvswitch", host=name, reduction=capability)
        for device in devices:
            layout.link(device, switch, self.nvlink, self.nvlink_latency)
        return self.with_nics(layout, name, devices, cpus)


class DgxA100(_NvSwitchServer):
    """Eight A100 at NVSwitches that do not reduce, 12 NVLink 3 of 25 GB/s each; eight HDR NICs."""

    kind: Literal["dgx-a100"] = "dgx-a100"
    flops: Flops | None = 312e12  # bf16 tensor cores, dense, data sheet
    tf32_flops: Flops | None = 156e12  # dense, data sheet
    float32_flops: Flops | None = 19.5e12  # data sheet
    device_memory: Bytes | None = 80 * 2**30
    device_memory_bandwidth: Rate | None = 2039e9
    nvlink: Rate = 300e9
    pcie: Rate = 24e9  # PCIe 4.0 x16: twice 3.0's 12 GB/s


class DgxH100(_NvSwitchServer):
    """Eight H100 at NVSwitches that reduce and multicast (NVLS), 18 NVLink 4 of 25 GB/s each; eight NDR NICs."""

    kind: Literal["dgx-h100"] = "dgx-h100"
    flops: Flops | None = 989e12  # bf16 tensor cores, dense, data sheet
    float8_flops: Flops | None = 1979e12  # dense: half of the sheet's 3,958 with sparsity
    tf32_flops: Flops | None = 494.7e12  # dense: half of the sheet's 989 with sparsity
    float32_flops: Flops | None = 67e12  # data sheet
    device_memory: Bytes | None = 80 * 2**30
    device_memory_bandwidth: Rate | None = 3350e9
    nvlink: Rate = 450e9
    pcie: Rate = 48e9  # PCIe 5.0 x16
    reduction: ReductionField = Field(
        default_factory=lambda: ReductionTable(streaming=True, low_latency=False, efficiency=1.0)
    )


class DgxH200(DgxH100):
    """Eight H200: the H100's processor, links and switches with more and faster memory (data sheet)."""

    kind: Literal["dgx-h200"] = "dgx-h200"  # type: ignore[assignment]
    device_memory: Bytes | None = 143771 * 2**20  # nvidia-smi; the sheet's 141 "GB" are these 140.4 GiB
    device_memory_bandwidth: Rate | None = 4800e9


class DgxB200(DgxH100):
    """Eight B200 at NVSwitches that reduce, 18 NVLink 5 of 50 GB/s each; eight NDR NICs (data sheet)."""

    kind: Literal["dgx-b200"] = "dgx-b200"  # type: ignore[assignment]
    flops: Flops | None = 2250e12  # bf16 tensor cores, dense: half of the sheet's 36 PFLOP/s with sparsity, by eight
    float8_flops: Flops | None = 4500e12  # dense: half of the sheet's 72 PFLOP/s with sparsity, by eight
    tf32_flops: Flops | None = 1125e12  # dense: half of HGX B200's 18 PFLOP/s with sparsity, by eight
    float32_flops: Flops | None = 75e12  # HGX B200's 600 TFLOP/s by eight
    device_memory: Bytes | None = 183359 * 2**20  # nvidia-smi (TensorRT-LLM #10278); the sheet's 180 "GB" are GiB
    device_memory_bandwidth: Rate | None = 8000e9
    nvlink: Rate = 900e9


class Mi300x(_DeviceServer):
    """Eight MI300X, each joined to each other by one Infinity Fabric link of 64 GB/s; eight NICs of 400 Gbit/s.

    Rates, memory and the full mesh: AMD's data sheet of the MI300X platform.
    """

    kind: Literal["mi300x"] = "mi300x"
    devices: Count = Field(default=8, ge=2, le=8)
    flops: Flops | None = 1307.4e12  # bf16, dense
    float8_flops: Flops | None = 2614.9e12  # dense, data sheet
    float32_flops: Flops | None = 163.4e12  # data sheet; torch does not take its TF32 (653.7) without being told to
    device_memory: Bytes | None = 196592 * 2**20  # rocminfo's 201,310,208 KiB (ROCm/vllm #397); the sheet's 192 "GB"
    device_memory_bandwidth: Rate | None = 5300e9
    nvlink: Rate = 64e9  # of one link; Infinity Fabric, not NVLink
    nvlink_latency: Seconds = 700e-9
    pcie: Rate = 48e9  # PCIe 5.0 x16

    def place(self, layout: GraphBuilder, name: str) -> list[int]:
        """Add the mesh, and a NIC for every device."""
        cpus = self.sockets(layout, name)
        devices = self.all_devices(layout, name)
        self.mesh(layout, devices, self.nvlink, self.nvlink_latency)
        return self.with_nics(layout, name, devices, cpus)


Server: TypeAlias = (
    PlainHost | CommodityServer | EflopsServer | Ac922 | Dgx1 | DgxA100 | DgxH100 | DgxH200 | DgxB200 | Mi300x
)
AnyServer = Annotated[Server, Field(discriminator="kind")]

SERVERS: dict[str, type[Server]] = {form.model_fields["kind"].default: form for form in get_args(Server)}
