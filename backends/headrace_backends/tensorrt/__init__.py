"""The backend `tensorrt`: runs engines that TensorRT built, on NVIDIA GPUs."""
