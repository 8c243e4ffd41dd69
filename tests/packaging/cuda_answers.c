/* Answers of a CUDA runtime with one GPU (an H100) that has no memory, for a process on a machine
 * without GPU and driver that works on tensors without data. torch asks for the device at every
 * operation, also at those that it only pretends to do. Nothing can be allocated. Built as
 * libcuda.so.1 it is taken for the driver too, of which torch asks one thing by that name. */
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <string.h>

#define ANSWER cudaError_t CUDARTAPI
#define NOTHING_TO_DO(name, ...) ANSWER name(__VA_ARGS__) { return cudaSuccess; }

static long handles = 16;

CUresult CUDAAPI cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active) {
    *flags = 0;
    *active = 1;
    return CUDA_SUCCESS;
}

ANSWER cudaGetDevice(int *device) { *device = 0; return cudaSuccess; }
ANSWER cudaGetDeviceCount(int *count) { *count = 1; return cudaSuccess; }
ANSWER cudaDriverGetVersion(int *version) { *version = 13000; return cudaSuccess; }

ANSWER cudaGetDeviceProperties(struct cudaDeviceProp *properties, int device) {
    memset(properties, 0, sizeof *properties);
    strcpy(properties->name, "NVIDIA H100 80GB HBM3");
    properties->major = 9;
    properties->multiProcessorCount = 132;
    properties->warpSize = 32;
    properties->totalGlobalMem = 80ull << 30;
    properties->sharedMemPerBlock = 49152;
    properties->sharedMemPerBlockOptin = 232448;
    properties->maxThreadsPerBlock = 1024;
    properties->maxThreadsPerMultiProcessor = 2048;
    properties->regsPerBlock = 65536;
    return cudaSuccess;
}

ANSWER cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device) {
    *value = 0;
    return cudaSuccess;
}

ANSWER cudaMalloc(void **place, size_t size) { return cudaErrorMemoryAllocation; }

ANSWER cudaMemGetInfo(size_t *available, size_t *total) {
    *available = *total = 80ull << 30;
    return cudaSuccess;
}

ANSWER cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status) {
    *status = cudaStreamCaptureStatusNone;
    return cudaSuccess;
}

ANSWER cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    *least = 0;
    *greatest = -5;
    return cudaSuccess;
}

ANSWER cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority) {
    *stream = (cudaStream_t)(handles += 16);
    return cudaSuccess;
}

ANSWER cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags) {
    *event = (cudaEvent_t)(handles += 16);
    return cudaSuccess;
}

NOTHING_TO_DO(cudaSetDevice, int device)
NOTHING_TO_DO(cudaGetLastError, void)
NOTHING_TO_DO(cudaPeekAtLastError, void)
NOTHING_TO_DO(cudaDeviceSynchronize, void)
NOTHING_TO_DO(cudaStreamQuery, cudaStream_t stream)
NOTHING_TO_DO(cudaStreamSynchronize, cudaStream_t stream)
NOTHING_TO_DO(cudaStreamWaitEvent, cudaStream_t stream, cudaEvent_t event, unsigned flags)
NOTHING_TO_DO(cudaEventRecord, cudaEvent_t event, cudaStream_t stream)
NOTHING_TO_DO(cudaEventRecordWithFlags, cudaEvent_t event, cudaStream_t stream, unsigned flags)
NOTHING_TO_DO(cudaEventQuery, cudaEvent_t event)
NOTHING_TO_DO(cudaEventDestroy, cudaEvent_t event)
NOTHING_TO_DO(cudaEventSynchronize, cudaEvent_t event)
NOTHING_TO_DO(cudaThreadExchangeStreamCaptureMode, enum cudaStreamCaptureMode *mode)
