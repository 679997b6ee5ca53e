// libtorch's CUDA graphs for on_gpu, which loads this where it runs on a GPU: what it links is not
// there where libtorch is for CUDA and CUDA's libraries are not installed.
#include <ATen/cuda/CUDAGraph.h>

#include <memory>

extern "C" {

void* on_gpu_begin_capture() {
  auto graph = std::make_unique<at::cuda::CUDAGraph>();
  graph->capture_begin();
  return graph.release();
}
void on_gpu_end_capture(void* graph) { static_cast<at::cuda::CUDAGraph*>(graph)->capture_end(); }
void on_gpu_launch(void* graph) { static_cast<at::cuda::CUDAGraph*>(graph)->replay(); }
void on_gpu_destroy(void* graph) { delete static_cast<at::cuda::CUDAGraph*>(graph); }

}  // extern "C"
