/* A Vulkan layer for the tests: injects a fault into any program that uses Vulkan.
 *
 * SWITCHGEAR_TEST_FAULT=WHERE:WHAT[:N]; the first N calls of that place pass.
 *   instance:crash, instance:hang           vkCreateInstance
 *   device:crash                            vkCreateDevice
 *   submit:lost, submit:skip                vkQueueSubmit (skip: succeeds and does nothing)
 *   wait:lost, wait:hang                    vkWaitForFences
 *   memory:out                              vkAllocateMemory
 * SWITCHGEAR_TEST_DELAY=FILE; each vkQueueSubmit first sleeps as many microseconds as stand in
 * the file, which is read anew each time: a GPU that throttles.
 */
#include <stdlib.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>
#include <vulkan/vk_layer.h>
#include <vulkan/vulkan.h>

#define EXPORT __attribute__((visibility("default")))

static PFN_vkGetInstanceProcAddr next_instance_proc;
static PFN_vkGetDeviceProcAddr next_device_proc;
static PFN_vkQueueSubmit next_submit;
static PFN_vkWaitForFences next_wait;
static PFN_vkAllocateMemory next_allocate;

/* Whether the fault is of this place and due; `calls` counts the place's calls. */
static int due(const char *fault, int *calls)
{
    const char *wanted = getenv("SWITCHGEAR_TEST_FAULT");
    size_t length = strlen(fault);
    if (!wanted || strncmp(wanted, fault, length) || (wanted[length] && wanted[length] != ':'))
        return 0;
    return (*calls)++ >= (wanted[length] ? atoi(wanted + length + 1) : 0);
}

static void hang(void)
{
    for (;;)
        pause();
}

static void crash(const char *where)
{
    fprintf(stderr, "fault layer: assertion failed in %s\n", where);
    abort();
}

static void delay(void)
{
    const char *path = getenv("SWITCHGEAR_TEST_DELAY");
    FILE *file = path ? fopen(path, "r") : NULL;
    int delay_us = 0;
    if (!file)
        return;
    if (fscanf(file, "%d", &delay_us) == 1 && delay_us > 0)
        usleep((useconds_t)delay_us);
    fclose(file);
}

static VKAPI_ATTR VkResult VKAPI_CALL submit(
    VkQueue queue, uint32_t count, const VkSubmitInfo *infos, VkFence fence)
{
    static int lost, skip;
    if (due("submit:lost", &lost))
        return VK_ERROR_DEVICE_LOST;
    if (due("submit:skip", &skip))
        count = 0;
    delay();
    return next_submit(queue, count, infos, fence);
}

static VKAPI_ATTR VkResult VKAPI_CALL wait_for(
    VkDevice device, uint32_t count, const VkFence *fences, VkBool32 all, uint64_t timeout)
{
    static int lost, stuck;
    if (due("wait:lost", &lost))
        return VK_ERROR_DEVICE_LOST;
    if (due("wait:hang", &stuck))
        hang();
    return next_wait(device, count, fences, all, timeout);
}

static VKAPI_ATTR VkResult VKAPI_CALL allocate(
    VkDevice device, const VkMemoryAllocateInfo *info, const VkAllocationCallbacks *callbacks,
    VkDeviceMemory *memory)
{
    static int calls;
    if (due("memory:out", &calls))
        return VK_ERROR_OUT_OF_DEVICE_MEMORY;
    return next_allocate(device, info, callbacks, memory);
}

static VKAPI_ATTR VkResult VKAPI_CALL create_instance(
    const VkInstanceCreateInfo *info, const VkAllocationCallbacks *callbacks, VkInstance *made)
{
    static int crashes, hangs;
    if (due("instance:crash", &crashes))
        crash("vkCreateInstance");
    if (due("instance:hang", &hangs))
        hang();
    VkLayerInstanceCreateInfo *link = (void *)info->pNext;
    while (link && !(link->sType == VK_STRUCTURE_TYPE_LOADER_INSTANCE_CREATE_INFO
                     && link->function == VK_LAYER_LINK_INFO))
        link = (void *)link->pNext;
    if (!link)
        return VK_ERROR_INITIALIZATION_FAILED;
    next_instance_proc = link->u.pLayerInfo->pfnNextGetInstanceProcAddr;
    link->u.pLayerInfo = link->u.pLayerInfo->pNext;
    PFN_vkCreateInstance create = (void *)next_instance_proc(NULL, "vkCreateInstance");
    return create(info, callbacks, made);
}

static VKAPI_ATTR VkResult VKAPI_CALL create_device(
    VkPhysicalDevice physical, const VkDeviceCreateInfo *info,
    const VkAllocationCallbacks *callbacks, VkDevice *made)
{
    static int crashes;
    if (due("device:crash", &crashes))
        crash("vkCreateDevice");
    VkLayerDeviceCreateInfo *link = (void *)info->pNext;
    while (link && !(link->sType == VK_STRUCTURE_TYPE_LOADER_DEVICE_CREATE_INFO
                     && link->function == VK_LAYER_LINK_INFO))
        link = (void *)link->pNext;
    if (!link)
        return VK_ERROR_INITIALIZATION_FAILED;
    PFN_vkGetInstanceProcAddr instance_proc = link->u.pLayerInfo->pfnNextGetInstanceProcAddr;
    next_device_proc = link->u.pLayerInfo->pfnNextGetDeviceProcAddr;
    link->u.pLayerInfo = link->u.pLayerInfo->pNext;
    PFN_vkCreateDevice create = (void *)instance_proc(NULL, "vkCreateDevice");
    VkResult result = create(physical, info, callbacks, made);
    if (result != VK_SUCCESS)
        return result;
    next_submit = (void *)next_device_proc(*made, "vkQueueSubmit");
    next_wait = (void *)next_device_proc(*made, "vkWaitForFences");
    next_allocate = (void *)next_device_proc(*made, "vkAllocateMemory");
    return VK_SUCCESS;
}

static PFN_vkVoidFunction own(const char *name);

EXPORT VKAPI_ATTR PFN_vkVoidFunction VKAPI_CALL fault_layer_device_proc(
    VkDevice device, const char *name)
{
    PFN_vkVoidFunction found = own(name);
    return found ? found : next_device_proc(device, name);
}

EXPORT VKAPI_ATTR PFN_vkVoidFunction VKAPI_CALL fault_layer_instance_proc(
    VkInstance instance, const char *name)
{
    PFN_vkVoidFunction found = own(name);
    return found ? found : next_instance_proc(instance, name);
}

static PFN_vkVoidFunction own(const char *name)
{
    static const struct { const char *name; PFN_vkVoidFunction function; } table[] = {
        {"vkGetInstanceProcAddr", (PFN_vkVoidFunction)fault_layer_instance_proc},
        {"vkGetDeviceProcAddr", (PFN_vkVoidFunction)fault_layer_device_proc},
        {"vkCreateInstance", (PFN_vkVoidFunction)create_instance},
        {"vkCreateDevice", (PFN_vkVoidFunction)create_device},
        {"vkQueueSubmit", (PFN_vkVoidFunction)submit},
        {"vkWaitForFences", (PFN_vkVoidFunction)wait_for},
        {"vkAllocateMemory", (PFN_vkVoidFunction)allocate},
    };
    for (size_t i = 0; i < sizeof table / sizeof *table; i++)
        if (!strcmp(name, table[i].name))
            return table[i].function;
    return NULL;
}
