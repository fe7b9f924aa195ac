"""`cupy.cuda.texture`: textures and surfaces have no counterpart on the host."""

from gpucoll.errors import UsageError


def _refused(name):
    def make(*args, **options):
        raise UsageError(f"cupy.cuda.texture.{name} has no counterpart on the host", code="GC-EMULATION")

    return make


ChannelFormatDescriptor, CUDAarray, ResourceDescriptor, SurfaceObject, TextureDescriptor, TextureObject = map(
    _refused, "ChannelFormatDescriptor CUDAarray ResourceDescriptor SurfaceObject TextureDescriptor "
              "TextureObject".split())
