"""The calls outside of gpucoll/progress that may wait and are known: for each reason the rows of `wait_places`.

A reason says what bounds the wait, and who ends it if a rank that is awaited dies. Rows of the room `precheck` are not
here: its ranks are virtual and take turns in one process, which waits for no other one. Nor are those of `emulation`,
which waits as CUDA and NCCL do.
"""

KNOWN = {
    "a work of a communicator: it waits in `Progress.until`": """
        block_scaled/__init__.py BlockScaledCollectives._sum came.wait
        communicator/points.py PointToPoint.probe awaiting(work, End('probe', *pattern, 0, [(), None])).wait
        communicator/points.py PointToPoint.blocking awaiting(work, *ends_of(state, x, dst, out, src, tag)).wait
        communicator/points.py PointToPoint.point work.wait
        communicator/points.py PointToPoint.group work.wait
        distributed/send_recv.py recv work.wait
        distributed/work.py DistributedWork.wait self._work.wait
        distributed/work.py DistributedWork.synchronize self.wait
        mpi/__init__.py Request.Wait self._work.synchronize
        mpi/__init__.py Request.Wait self._work.wait
        mpi/__init__.py Request.Test self.Wait
        mpi/__init__.py Request.wait self.Wait
        mpi/__init__.py Request.Waitall request.Wait
        torch/group.py TorchProcessGroup.monitored_barrier self._caller.make(call, (), at_once=True).wait
        torch/handles.py TorchWork.synchronize self.wait
        torch/handles.py QueuedWork._ends self._ended.wait
        torch/handles.py MessageWork._ends self._begun[0].wait
        torch/handles.py Caller.make nested.wait
        torch/handles.py Caller.close thread.join
        torch/torchft.py _ReportedWork.wait self._work.wait
        training/server.py _Shard._serve work.wait
        """,
    "a poll of `Progress.until`, which runs the hooks": """
        calibration/measure.py _rarely time.sleep
        """,
    "each poll asks the communicator for a message, and thereby runs the hooks": """
        distributed/work.py DistributedWork.wait becomes
        torch/handles.py MessageWork._ends becomes
        """,
    "the future or the request has ended, or was cancelled": """
        device/messages.py MatchedReceive.Wait self._request.Wait
        device/messages.py Counted._gives_way self.request.Wait
        device/nccl.py Nccl._in_turn begun.result
        device/nccl.py Nccl._made begun.result
        device/nccl.py Nccl._give_up begun.exception
        device/nccl.py Nccl._give_up begun.result
        dask/__init__.py Workers._raise one.exception
        dask/__init__.py Workers._raise (own or failed)[0].result
        """,
    "no wait: a function of the same name": """
        executors/native.py _datatype getattr(MPI, f'UINT{8 * dtype.itemsize}_T').Dup
        torch/group.py TorchProcessGroup._end_coalescing work.result
        torch/handles.py JoinedWork.__init__ work.result
        training/buckets.py Pipeline.start wait
        training/buckets.py Pipeline.finish wait
        communicator/lifecycle.py tell_meeting ranks.Free
        health/preflight.py Preflight._use_offers mapped.accept
        """,
    "without blocking: what is not there at once is not taken": """
        launch/mpi_jobs.py MpiexecJob._accept listener.accept
        launch/mpi_jobs.py MpiexecJob._hear keeper.recv
        device/store.py private_folder fcntl.flock
        device/store.py _sweep fcntl.flock
        executors/peer/sharing.py GpuSeat.take fcntl.flock
        executors/peer/sharing.py GpuSeat.leave fcntl.flock
        executors/peer/descriptors.py DescriptorOffer.give self._listener.accept
        """,
    "a constant of at most a few seconds": """
        device/cuda.py CudaDevice.fill_with_nan becomes
        device/streams.py _Recording.__init__ self._has_ended.wait
        executors/engine/__init__.py EngineExecutor.differ time.sleep
        core/output.py attempt thread.join
        health/devices.py DeviceWatch.close self._looking.acquire
        health/devices.py stop thread.join
        health/guard.py Guard.told time.sleep
        health/observed.py Faults.on_phase time.sleep
        health/preflight.py Preflight.explain time.sleep
        health/processes.py Processes.ended poll.poll
        health/processes.py Processes.ended time.sleep
        health/remote.py Watch._ask becomes
        launch/bootstrap.py abort time.sleep
        launch/ctrl_c.py _end time.sleep
        launch/mpi_jobs.py _aborting time.sleep
        transport/rendezvous.py RollCall.missing becomes
        transport/rendezvous.py wait_for_all becomes
        transport/rendezvous.py becomes time.sleep
        """,
    "a thread that idles until there is work, and that ends with the process": """
        device/command.py _end_with_parent parent.join
        executors/native.py BlockingWatch._look self._closed.wait
        health/devices.py _serve _changes.wait_for
        health/metrics.py Exporter.write_on.serve time.sleep
        launch/ctrl_c.py watched.watch reader.recv
        launch/watchdog.py _main select.select
        torch/handles.py Caller._serve self._calls.get
        transport/connections.py Hub._accept listener.accept
        transport/connections.py Hub._accept time.sleep
        transport/connections.py Hub._makes_room self._changed.wait
        """,
    "the start of a communicator: the deadline of `init`, kept by the store or by `bootstrap.meet`": """
        communicator/backends.py _use_wire link.mpi.allgather
        communicator/links.py MpiLink._meet self.mpi.allgather
        communicator/links.py StoreLink._meet self.mpi.allgather
        communicator/links.py MpiLink.split part.Free
        executors/peer/descriptors.py reach connected.connect
        health/clocks.py align mpi.allgather
        health/remote.py Watch.__init__ mpi.allgather
        health/remote.py Watch.__init__ mpi.bcast
        health/remote.py Watch._meet mpi.bcast
        health/remote.py Watch._meet mpi.allgather
        health/remote.py Watch._connects socket.create_connection
        health/remote.py Watch._connects time.sleep
        launch/places.py _announcement store.wait
        ray/__init__.py _announced.is_open socket.create_connection
        ray/__init__.py _announced becomes
        torch/membership.py TorchStore.get becomes
        torch/membership.py _by_mpi part.Free
        transport/connections.py Connection._fill self.socket.recv
        transport/join_ports.py holds socket.getaddrinfo
        transport/kvstore.py MemoryStore.get self._changed.wait_for
        transport/kvstore.py StoreClient.__init__ socket.create_connection
        transport/kvstore.py listener_at socket.getaddrinfo
        transport/kvstore.py _connected.connects socket.create_connection
        transport/kvstore.py _connected.connects connected.connect
        transport/kvstore.py _connected becomes
        transport/rendezvous.py by_first_rank mpi.bcast
        transport/ucx.py UcxProcess.context time.sleep
        transport/ucx.py messages ranks.allgather
        """,
    "with GPUCOLL_DUMP_DIR, at the start, once all ranks have met: a death here is left to the launcher": """
        communicator/lifecycle.py Lifecycle._flight_of mpi.bcast
        """,
    "a split or a shrink, in a helper thread for which `Progress` waits": """
        communicator/elastic.py _rest_by_mpi.shrunk base.Shrink
        communicator/transports.py Transport.split self._ranks.allgather
        communicator/links.py MpiLink.split self.mpi.Split
        """,
    "survivors and newcomers: a deadline of the call, and a look for ended ranks every few milliseconds": """
        communicator/thread_hub.py ThreadHub.survivors self._changed.wait
        launch/regroup.py _await_arrivals APPLICANTS.wait
        launch/regroup.py survivors APPLICANTS.wait
        launch/regroup.py grown APPLICANTS.wait
        transport/applicants.py Applicants.wait self._changed.wait
        transport/join_ports.py ask socket.create_connection
        transport/join_ports.py ask_for_a_place time.sleep
        """,
    "the end: all ranks have agreed to close, and a rank that has ended since must raise nothing; a deadline": """
        communicator/gpu.py Gpu.has_ended time.sleep
        communicator/process_end.py _end_mpi MPI.Finalize
        communicator/links.py MpiLink.free self.wire.Free
        communicator/links.py MpiLink.free self.mpi.Free
        device/nccl.py Nccl._destroy cupy.cuda.Device().synchronize
        device/nccl.py allocate cupy.cuda.Device().synchronize
        mpi/__init__.py Comm.Free self.mpi.Free
        transport/connections.py Hub.shut self._accepts.join
        transport/connections.py Hub.is_left self._changed.wait_for
        """,
    "work on this rank's GPU: the watchdog ends kernels that wait for a rank in vain": """
        calibration/measure.py _time _module(device).cuda.get_current_stream().synchronize
        executors/peer/ipc.py CudaSlab.__init__ cupy.cuda.runtime.deviceSynchronize
        executors/peer/ipc.py IpcMemory.upload self._uploads.synchronize
        torch/group.py TorchProcessGroup.barrier.call self.synchronize
        torch/group.py TorchProcessGroup.synchronize torch.cuda.synchronize
        torch/torchft.py ProcessGroupGpucoll.errored group.synchronize
        training/parameters.py on_host array.get
        training/partner.py _wait sys.modules['cupy'].cuda.get_current_stream().synchronize
        """,
    "a thread of this process that writes files": """
        training/checkpoint.py Saving.wait self._thread.join
        training/zero.py ZeRO.save self._saving.wait
        """,
    "monitored_barrier: a deadline, at which all missing ranks are named; the group can be used further": """
        distributed/start.py _collect becomes
        distributed/start.py _report becomes
        """,
    "Dask: looks for lost workers every fraction of a second": """
        dask/__init__.py Workers.__exit__ wait
        dask/__init__.py Workers._results wait
        dask/__init__.py Workers._raise wait
        """,
    "a process started by this one, with a deadline or known to have been killed": """
        device/gxx.py _run subprocess.run
        doctor/facts.py _mpiexec subprocess.run
        launch/jobs.py main subprocess.run
        launch/standalone.py Job._ended process.wait
        """,
    "the launcher: it waits for its ranks, as long as they run, and hears signals and failures meanwhile": """
        launch/mpi_jobs.py MpiexecJob.run self._loop.run_forever
        launch/standalone.py Job.run self._loop.run_forever
        """,
    "the launcher: mpiexec has been killed, or has ended": """
        launch/mpi_jobs.py MpiexecJob.run self._mpiexec.wait
        """,
    "a rank's keeper: until its rank or its launcher ends": """
        launch/mpi_jobs.py _keep events.poll
        launch/mpi_jobs.py _keep os.waitpid
        """,
    "a pipe that has something to read, or has one byte for the first reader, and then ends": """
        launch/standalone.py Job._take_reports os.read
        launch/standalone.py follow.alone os.read
        """,
    "the launcher, or the rank that follows it: pauses of constant length": """
        launch/standalone.py follow.report time.sleep
        launch/standalone.py follow.alone time.sleep
        launch/arguments.py refuse wait_for_all
        """,
    "`gpucoll doctor` and `gpucoll tune`, under an MPI that ends the job after a death": """
        calibration/commands.py _tune comm.mpi.allgather
        calibration/measure.py samples comm.mpi.allgather
        calibration/measure.py _time comm.mpi.Barrier
        calibration/measure.py links comm.mpi.allgather
        doctor/__init__.py _alone time.sleep
        doctor/__init__.py examine comm.mpi.allgather
        doctor/probes.py measure time.sleep
        doctor/probes.py _measure_all wait_for_all
        doctor/probes.py _measure_all mpi.allgather
        doctor/probes.py _Link.latency self.wait
        doctor/probes.py _Link.stream self.wait
        doctor/probes.py _Link.wait becomes
        doctor/probes.py exchange mpi.allgather
        doctor/probes.py exchange link.wait
        """,
}
