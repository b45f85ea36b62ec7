/* An OpenCL driver (ICD) for the tests: one platform, one device, and a fault on demand.
 *
 * SWITCHGEAR_TEST_OPENCL_DRIVER=
 *   platform_crash | platform_hang     when the loader asks for the platforms
 *   no_device                          CL_DEVICE_NOT_FOUND
 *   context_crash | context_hang | context_memory (CL_OUT_OF_HOST_MEMORY)   at clCreateContext
 *   buffer_memory                      CL_MEM_OBJECT_ALLOCATION_FAILURE (also when unset)
 *   write_lost                         CL_OUT_OF_RESOURCES at clEnqueueWriteBuffer
 */
#define CL_TARGET_OPENCL_VERSION 120
#define CL_USE_DEPRECATED_OPENCL_1_1_APIS
#define CL_USE_DEPRECATED_OPENCL_1_2_APIS
#include <CL/cl.h>
#include <CL/cl_icd.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))

typedef struct { cl_icd_dispatch *dispatch; } Object;

static cl_icd_dispatch table;
static Object platform = {&table}, device = {&table}, context = {&table}, queue = {&table};
static Object memory = {&table};

static int mode_is(const char *mode)
{
    const char *wanted = getenv("SWITCHGEAR_TEST_OPENCL_DRIVER");
    return wanted && !strcmp(wanted, mode);
}

static void crash(const char *where)
{
    fprintf(stderr, "stub driver: assertion failed in %s\n", where);
    abort();
}

static void hang(void)
{
    for (;;)
        pause();
}

static cl_int give(const void *value, size_t size, size_t room, void *to, size_t *needed)
{
    if (needed)
        *needed = size;
    if (to && room < size)
        return CL_INVALID_VALUE;
    if (to)
        memcpy(to, value, size);
    return CL_SUCCESS;
}

static cl_int give_text(const char *text, size_t room, void *to, size_t *needed)
{
    return give(text, strlen(text) + 1, room, to, needed);
}

static cl_int CL_API_CALL platform_info(
    cl_platform_id id, cl_platform_info name, size_t room, void *to, size_t *needed)
{
    (void)id;
    switch (name) {
    case CL_PLATFORM_NAME: return give_text("Stub platform", room, to, needed);
    case CL_PLATFORM_VENDOR: return give_text("Switchgear tests", room, to, needed);
    case CL_PLATFORM_VERSION: return give_text("OpenCL 1.2 stub", room, to, needed);
    case CL_PLATFORM_PROFILE: return give_text("FULL_PROFILE", room, to, needed);
    case CL_PLATFORM_EXTENSIONS: return give_text("cl_khr_icd", room, to, needed);
    case CL_PLATFORM_ICD_SUFFIX_KHR: return give_text("STUB", room, to, needed);
    default: return CL_INVALID_VALUE;
    }
}

static cl_int CL_API_CALL platform_ids(cl_uint room, cl_platform_id *ids, cl_uint *count)
{
    if (mode_is("platform_crash"))
        crash("clIcdGetPlatformIDsKHR");
    if (mode_is("platform_hang"))
        hang();
    if (ids && room)
        ids[0] = (cl_platform_id)&platform;
    if (count)
        *count = 1;
    return CL_SUCCESS;
}

static cl_int CL_API_CALL device_ids(
    cl_platform_id id, cl_device_type type, cl_uint room, cl_device_id *ids, cl_uint *count)
{
    (void)id, (void)type;
    if (mode_is("no_device"))
        return CL_DEVICE_NOT_FOUND;
    if (ids && room)
        ids[0] = (cl_device_id)&device;
    if (count)
        *count = 1;
    return CL_SUCCESS;
}

static cl_int CL_API_CALL device_info(
    cl_device_id id, cl_device_info name, size_t room, void *to, size_t *needed)
{
    (void)id;
    cl_device_type type = CL_DEVICE_TYPE_GPU;
    cl_uint vendor = 0x1234, yes = CL_TRUE;
    cl_ulong size = 1 << 30;
    void *parent = &platform;
    switch (name) {
    case CL_DEVICE_NAME: return give_text("Stub device", room, to, needed);
    case CL_DEVICE_VENDOR: return give_text("Switchgear tests", room, to, needed);
    case CL_DEVICE_VERSION: return give_text("OpenCL 1.2 stub", room, to, needed);
    case CL_DRIVER_VERSION: return give_text("1.0", room, to, needed);
    case CL_DEVICE_OPENCL_C_VERSION: return give_text("OpenCL C 1.2", room, to, needed);
    case CL_DEVICE_EXTENSIONS: return give_text("", room, to, needed);
    case CL_DEVICE_TYPE: return give(&type, sizeof type, room, to, needed);
    case CL_DEVICE_VENDOR_ID: return give(&vendor, sizeof vendor, room, to, needed);
    case CL_DEVICE_PLATFORM: return give(&parent, sizeof parent, room, to, needed);
    case CL_DEVICE_HOST_UNIFIED_MEMORY: return give(&yes, sizeof yes, room, to, needed);
    case CL_DEVICE_MAX_MEM_ALLOC_SIZE:
    case CL_DEVICE_GLOBAL_MEM_SIZE: return give(&size, sizeof size, room, to, needed);
    default: return CL_INVALID_VALUE;
    }
}

static cl_context CL_API_CALL create_context(
    const cl_context_properties *properties, cl_uint count, const cl_device_id *ids,
    void(CL_CALLBACK *notify)(const char *, const void *, size_t, void *), void *data, cl_int *error)
{
    (void)properties, (void)count, (void)ids, (void)notify, (void)data;
    if (mode_is("context_crash"))
        crash("clCreateContext");
    if (mode_is("context_hang"))
        hang();
    if (mode_is("context_memory")) {
        *error = CL_OUT_OF_HOST_MEMORY;
        return NULL;
    }
    *error = CL_SUCCESS;
    return (cl_context)&context;
}

static cl_int CL_API_CALL context_info(
    cl_context id, cl_context_info name, size_t room, void *to, size_t *needed)
{
    (void)id;
    void *only = &device;
    cl_uint one = 1;
    if (name == CL_CONTEXT_DEVICES)
        return give(&only, sizeof only, room, to, needed);
    return name == CL_CONTEXT_NUM_DEVICES ? give(&one, sizeof one, room, to, needed)
                                          : CL_INVALID_VALUE;
}

static cl_command_queue CL_API_CALL create_queue(
    cl_context id, cl_device_id on, cl_command_queue_properties properties, cl_int *error)
{
    (void)id, (void)on, (void)properties;
    *error = CL_SUCCESS;
    return (cl_command_queue)&queue;
}

static cl_program CL_API_CALL create_program(
    cl_context id, cl_uint count, const char **text, const size_t *lengths, cl_int *error)
{
    (void)id, (void)count, (void)text, (void)lengths;
    *error = CL_COMPILER_NOT_AVAILABLE;
    return NULL;
}

static cl_mem CL_API_CALL create_buffer(
    cl_context id, cl_mem_flags flags, size_t size, void *host, cl_int *error)
{
    (void)id, (void)flags, (void)size, (void)host;
    *error = mode_is("write_lost") ? CL_SUCCESS : CL_MEM_OBJECT_ALLOCATION_FAILURE;
    return *error ? NULL : (cl_mem)&memory;
}

static cl_int CL_API_CALL memory_info(
    cl_mem id, cl_mem_info name, size_t room, void *to, size_t *needed)
{
    (void)id;
    cl_mem_object_type type = CL_MEM_OBJECT_BUFFER;
    size_t size = 1 << 28;
    if (name == CL_MEM_TYPE)
        return give(&type, sizeof type, room, to, needed);
    return name == CL_MEM_SIZE ? give(&size, sizeof size, room, to, needed) : CL_INVALID_VALUE;
}

static cl_int CL_API_CALL write_buffer(
    cl_command_queue id, cl_mem to, cl_bool blocking, size_t offset, size_t size,
    const void *from, cl_uint count, const cl_event *events, cl_event *event)
{
    (void)id, (void)to, (void)blocking, (void)offset, (void)size, (void)from;
    (void)count, (void)events, (void)event;
    return CL_OUT_OF_RESOURCES;
}

static cl_int CL_API_CALL keep_context(cl_context id) { (void)id; return CL_SUCCESS; }
static cl_int CL_API_CALL keep_queue(cl_command_queue id) { (void)id; return CL_SUCCESS; }
static cl_int CL_API_CALL keep_memory(cl_mem id) { (void)id; return CL_SUCCESS; }
static cl_int CL_API_CALL keep_device(cl_device_id id) { (void)id; return CL_SUCCESS; }

static void fill_table(void)
{
    table.clGetPlatformIDs = platform_ids;
    table.clGetPlatformInfo = platform_info;
    table.clGetDeviceIDs = device_ids;
    table.clGetDeviceInfo = device_info;
    table.clCreateContext = create_context;
    table.clRetainContext = table.clReleaseContext = keep_context;
    table.clGetContextInfo = context_info;
    table.clCreateCommandQueue = create_queue;
    table.clRetainCommandQueue = table.clReleaseCommandQueue = keep_queue;
    table.clFinish = keep_queue;
    table.clCreateProgramWithSource = create_program;
    table.clCreateBuffer = create_buffer;
    table.clRetainMemObject = table.clReleaseMemObject = keep_memory;
    table.clGetMemObjectInfo = memory_info;
    table.clEnqueueWriteBuffer = write_buffer;
    table.clRetainDevice = table.clReleaseDevice = keep_device;
}

EXPORT CL_API_ENTRY cl_int CL_API_CALL clIcdGetPlatformIDsKHR(
    cl_uint room, cl_platform_id *ids, cl_uint *count)
{
    fill_table();
    return platform_ids(room, ids, count);
}

EXPORT CL_API_ENTRY cl_int CL_API_CALL clGetPlatformInfo(
    cl_platform_id id, cl_platform_info name, size_t room, void *to, size_t *needed)
{
    return platform_info(id, name, room, to, needed);
}

EXPORT CL_API_ENTRY void *CL_API_CALL clGetExtensionFunctionAddress(const char *name)
{
    if (!strcmp(name, "clIcdGetPlatformIDsKHR"))
        return (void *)clIcdGetPlatformIDsKHR;
    return NULL;
}
