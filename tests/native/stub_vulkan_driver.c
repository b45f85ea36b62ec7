/* A Vulkan driver (ICD) for the tests that has no device and fails on demand.
 *
 * SWITCHGEAR_TEST_VULKAN_DRIVER=
 *   crash | segfault | hang   at vkCreateInstance
 *   exit                      the same, with exit status 3
 *   scribble                  the same, and writes text of its own to every pipe that is open
 *   flood                     the same, without end and without a newline
 *   none                      an instance, and no device (also when unset)
 *   out_of_memory             at vkEnumeratePhysicalDevices
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include <vulkan/vk_icd.h>
#include <vulkan/vulkan.h>

#define EXPORT __attribute__((visibility("default")))

static int mode_is(const char *mode)
{
    const char *wanted = getenv("SWITCHGEAR_TEST_VULKAN_DRIVER");
    return wanted && !strcmp(wanted, mode);
}

static void scribble(const char *text)
{
    struct stat status;
    for (int fd = 3; fd < 64; fd++)
        if (!fstat(fd, &status) && S_ISFIFO(status.st_mode) && write(fd, text, strlen(text)) < 0)
            continue; /* A pipe's reading end: the next one may be the right one. */
}

static VKAPI_ATTR VkResult VKAPI_CALL create_instance(
    const VkInstanceCreateInfo *info, const VkAllocationCallbacks *callbacks, VkInstance *made)
{
    static VK_LOADER_DATA instance;
    (void)info, (void)callbacks;
    if (mode_is("crash")) {
        fprintf(stderr, "stub driver: assertion failed in vkCreateInstance\n");
        abort();
    }
    volatile int *volatile nowhere = NULL;
    if (mode_is("segfault"))
        *nowhere = 0;
    while (mode_is("hang"))
        pause();
    if (mode_is("exit"))
        _exit(3);
    if (mode_is("scribble"))
        scribble("debug: instance made\n");
    while (mode_is("flood"))
        scribble("debug: instance made, instance made, instance made, instance made; ");
    set_loader_magic_value(&instance);
    *made = (VkInstance)&instance;
    return VK_SUCCESS;
}

static VKAPI_ATTR void VKAPI_CALL destroy_instance(
    VkInstance instance, const VkAllocationCallbacks *callbacks)
{
    (void)instance, (void)callbacks;
}

static VKAPI_ATTR VkResult VKAPI_CALL enumerate_devices(
    VkInstance instance, uint32_t *count, VkPhysicalDevice *devices)
{
    (void)instance, (void)devices;
    if (mode_is("out_of_memory"))
        return VK_ERROR_OUT_OF_HOST_MEMORY;
    *count = 0;
    return VK_SUCCESS;
}

static VKAPI_ATTR VkResult VKAPI_CALL enumerate_extensions(
    const char *layer, uint32_t *count, VkExtensionProperties *properties)
{
    (void)layer, (void)properties;
    *count = 0;
    return VK_SUCCESS;
}

static VKAPI_ATTR VkResult VKAPI_CALL enumerate_version(uint32_t *version)
{
    *version = VK_API_VERSION_1_1;
    return VK_SUCCESS;
}

/* The loader wants these to be there; without a device nothing calls them. */
static VKAPI_ATTR VkResult VKAPI_CALL never_called(void)
{
    abort();
}

EXPORT VKAPI_ATTR PFN_vkVoidFunction VKAPI_CALL vk_icdGetInstanceProcAddr(
    VkInstance instance, const char *name)
{
    (void)instance;
    if (!strcmp(name, "vkCreateInstance"))
        return (PFN_vkVoidFunction)create_instance;
    if (!strcmp(name, "vkDestroyInstance"))
        return (PFN_vkVoidFunction)destroy_instance;
    if (!strcmp(name, "vkEnumeratePhysicalDevices"))
        return (PFN_vkVoidFunction)enumerate_devices;
    if (!strcmp(name, "vkEnumerateInstanceExtensionProperties"))
        return (PFN_vkVoidFunction)enumerate_extensions;
    if (!strcmp(name, "vkEnumerateInstanceVersion"))
        return (PFN_vkVoidFunction)enumerate_version;
    if (!strncmp(name, "vkGetPhysicalDevice", 19) || !strcmp(name, "vkCreateDevice")
        || !strcmp(name, "vkEnumerateDeviceExtensionProperties")
        || !strcmp(name, "vkGetDeviceProcAddr"))
        return (PFN_vkVoidFunction)never_called;
    return NULL;
}

EXPORT VKAPI_ATTR VkResult VKAPI_CALL vk_icdNegotiateLoaderICDInterfaceVersion(uint32_t *version)
{
    if (*version > 5)
        *version = 5;
    return VK_SUCCESS;
}

EXPORT VKAPI_ATTR PFN_vkVoidFunction VKAPI_CALL vk_icdGetPhysicalDeviceProcAddr(
    VkInstance instance, const char *name)
{
    (void)instance, (void)name;
    return NULL;
}
